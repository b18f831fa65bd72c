"""GW35x: the router. Balance losses that are off, too strong, counted wrongly or without a gradient."""

from gatewright.preflight.fault import Fault, Rule, drop, set_to
from gatewright.preflight.job import Job

NO_AUX_FAMILIES = ("llama4", "deepseek_v2", "glm4_moe", "dots1", "lfm2_moe", "hunyuan_v1_moe", "deepseek_v3")
"""Families of transformers 5.24 whose forward pass returns no balance loss, whatever the config says."""
BIAS_FAMILIES = ("deepseek_v3", "glm4_moe", "dots1")
_HF = ("transformers", "trl", "llamafactory", "axolotl", "swift")


def _family(job: Job) -> str:
    return job.shape.family.removesuffix("_text") if job.shape else ""


def _router_trains(job: Job) -> bool:
    """Every weight trains, or the adapter covers all linear modules."""
    return job.moe and job.trains and (job.full or bool(job.router_trains.value))


def balance_loss_off(job: Job) -> Fault | None:
    """transformers computes the balance loss only when output_router_logits is set, and no trainer but TRL sets it. A
    router that trains at a learning rate ten times too high lost its first expert at step 40."""
    if not _router_trains(job) or job.mca.value or not job.uses("transformers", "llamafactory", "axolotl", "swift"):
        return None
    if (
        job.aux.get(0) > 0
        or job.router_logits.value
        or _family(job) in NO_AUX_FAMILIES
        or job.backend.value == "megatron"
    ):
        return None
    at = job.aux if job.aux.given else job.model
    return Fault(
        f"every weight of {job.model.value} trains, the router too, and no balance loss is on",
        (at,),
        "set router_aux_loss_coef (LLaMA-Factory: moe_aux_loss_coef) to 0.001 and output_router_logits to true, or "
        "freeze the router",
    )


def balance_loss_too_strong(job: Job) -> Fault | None:
    """The balance loss is worth its top-k when experts are balanced, so a coefficient near 1 outweighs the language
    loss: a config's 0.9 gave a loss of 930."""
    if not job.aux.get(0) >= 0.1:
        return None
    top_k = job.shape.top_k if job.shape else 0
    worth = f"; balanced it is worth {job.aux.get(0) * top_k:g}" if top_k else ""
    return Fault(
        f"{job.aux}{worth}: it outweighs the language loss",
        (job.aux,),
        "0.001 is usual for fine-tuning, 0.01 for training from scratch",
        set_to(job.aux, 0.001),
    )


def balance_loss_grows_with_ranks(job: Job) -> Fault | None:
    """The Trainer of transformers 5.24 adds the balance loss to every micro-batch without dividing it, then multiplies
    by the number of processes: its weight grows with accumulation × ranks. Trainers built on it inherit this unless
    they correct it, as TRL's SFT trainer and ms-swift do."""
    if not job.aux.get(0) > 0 or not job.moe or not job.uses("llamafactory", "axolotl") or job.mca.value:
        return None
    factor = job.accumulation.get(1) * (job.world or 1)
    if factor < 2:
        return None
    return Fault(
        f"{job.aux} may act as {job.aux.get(0) * factor:g}: × {job.accumulation.get(1)} micro-batches × "
        f"{job.world or 1} ranks",
        (job.aux, job.accumulation),
        f"compare the loss at step 1 with accumulation 1; if it grows, divide: {job.aux.get(0) / factor:.3g}",
    )


def balance_loss_pools_layers(job: Job) -> Fault | None:
    """transformers pools counts over all layers before it multiplies: layers that collapse on different experts cancel
    to a perfect score. From scratch 8 of 64 experts died under it, none under a loss per layer."""
    if not job.aux.get(0) > 0 or not job.moe or not job.uses(*_HF) or job.backend.value == "megatron":
        return None
    return Fault(
        f"{job.aux}: transformers' loss is pooled over {len(job.shape.layers) if job.shape else 0} layers and cannot "
        "see one that collapses",
        (job.aux,),
        "watch the load of each layer; Megatron and Gatewright balance by layer",
    )


def balance_loss_of_this_family_is_none(job: Job) -> Fault | None:
    """For some families transformers records router logits but returns no balance loss: the coefficient has no effect,
    though the config carries it."""
    if not job.aux.get(0) > 0 or _family(job) not in NO_AUX_FAMILIES or not job.uses(*_HF):
        return None
    return Fault(
        f"{job.aux} has no effect: transformers' {_family(job)} returns no balance loss",
        (job.aux,),
        "freeze the router, or train with Megatron",
        drop(job.aux),
    )


def correction_bias_is_never_updated(job: Job) -> Fault | None:
    """DeepSeek-V3 style routers balance by a bias that the training code must move. Nothing in transformers does, and
    these families have no balance loss either: full fine-tuning runs without any balancing."""
    if not _router_trains(job) or _family(job) not in BIAS_FAMILIES or not job.uses(*_HF):
        return None
    return Fault(
        f"{job.model.value} balances by e_score_correction_bias, which {'/'.join(sorted(job.tools & set(_HF)))} "
        "never updates",
        (job.model,),
        "freeze the router, or use a trainer that updates the bias (Megatron, torchtitan)",
    )


def reentrant_checkpointing_drops_the_gradient(job: Job) -> Fault | None:
    """Re-entrant checkpointing runs the forward pass without gradients: the router logits taken there carry none, and
    the balance loss is a constant that moves nothing."""
    if not job.reentrant.value or not job.aux.get(0) > 0 or job.checkpointing.value is False:
        return None
    return Fault(
        f"{job.reentrant} with {job.aux}: the balance loss has no gradient",
        (job.reentrant, job.aux),
        "set use_reentrant to false",
        set_to(job.reentrant, False),
    )


def force_balancing_left_on(job: Job) -> Fault | None:
    """moe_router_force_load_balancing replaces the router's output by noise, for benchmarks. Published recipes carry it
    uncommented."""
    if not job.force_balance.value:
        return None
    return Fault(
        f"{job.force_balance}: the router's choice is replaced by random numbers",
        (job.force_balance,),
        "take it out",
        drop(job.force_balance),
    )


def capacity_drops_tokens(job: Job) -> Fault | None:
    """A capacity factor drops what goes to a full expert. On one domain the loads are uneven for ever, so a longer
    context does not help: OLMoE at 1.25 drops 13 to 38 % of the assignments on code."""
    if job.capacity.value is None or job.capacity.value <= 0:
        return None
    return Fault(
        f"{job.capacity}: tokens beyond {job.capacity.value:g} × the mean load of an expert are dropped",
        (job.capacity,),
        "go dropless, or measure the loads and count the drops",
        drop(job.capacity),
    )


def router_in_half_precision(job: Job) -> Fault | None:
    """In bf16 near-equal router logits tie: 0.2 to 1 % of the tokens take another expert than in fp32, and training
    and serving disagree."""
    if (
        not job.uses("megatron")
        or not (job.ep.get(1) > 1 or job.aux.value is not None)
        or job.router_dtype.value == "fp32"
    ):
        return None
    at = job.ep if job.ep.given else job.aux
    return Fault(
        "--moe-router-dtype is not fp32: the router's softmax runs in the training type",
        (job.router_dtype if job.router_dtype.given else at,),
        "add --moe-router-dtype fp32",
        set_to(job.router_dtype, "fp32") if job.router_dtype.given else None,
    )


def trained_router_without_losses(job: Job) -> Fault | None:
    """A router that trains without a z-loss sharpens (log-sum-exp² from 5 to 25 at a high learning rate), and without a
    balance loss it starves experts."""
    if not job.router_trains.value or job.aux.get(0) > 0 or not job.uses("gatewright"):
        return None
    return Fault(
        f"{job.router_trains} with router.balance 0" + ("" if job.z.get(0) > 0 else " and router.z 0"),
        (job.router_trains,),
        "set router.balance and router.z to 0.001",
    )


def dpo_ignores_the_balance_loss(job: Job) -> Fault | None:
    """TRL's DPO trainer does not apply the coefficient under DeepSpeed."""
    if job.task.value != "dpo" or not job.aux.get(0) > 0 or job.backend.value != "deepspeed" or not job.uses("trl"):
        return None
    return Fault(
        f"{job.aux} is ignored by DPO under DeepSpeed",
        (job.aux,),
        "freeze the router for DPO",
    )


def balance_loss_in_reinforcement_learning(job: Job) -> Fault | None:
    """A coefficient of 0.001, taken from the model's config without a word, raised the gradient norm tenfold and cost
    accuracy in GRPO; with 0 the same run was healthy."""
    if job.task.value not in ("grpo", "rloo", "gdpo") or not job.moe or job.aux.value == 0:
        return None
    if not (job.uses("trl") or job.aux.get(0) > 0):
        return None
    said = str(job.aux) if job.aux.given else "the coefficient of the model's config (TRL applies it)"
    return Fault(
        f"{said} in {job.task.value}: the balance loss works against the reward",
        (job.aux if job.aux.given else job.task,),
        "set router_aux_loss_coef to 0",
        set_to(job.aux, 0),
    )


def balance_loss_with_4d_mask(job: Job) -> Fault | None:
    """neat_packing makes a 4-D mask for every kernel but flash attention, and transformers' balance loss crashes on the
    shape of such a mask."""
    if not job.isolated.value or not job.uses("llamafactory") or not job.aux.get(0) > 0:
        return None
    if job.attention.get("flash") not in ("sdpa", "eager"):
        return None
    return Fault(
        f"{job.isolated} with {job.attention} makes a 4-D mask, on which {job.aux.key} crashes",
        (job.attention, job.isolated, job.aux),
        "use flash_attn: fa2",
        set_to(job.attention, "fa2"),
    )


_AUX = "measured with transformers 5.24"
RULES = (
    Rule("GW351", "warning", balance_loss_off, f"{_AUX}; huggingface/transformers#44242; hiyouga/LLaMA-Factory#8054"),
    Rule("GW352", "error", balance_loss_too_strong, "modelscope/ms-swift#5627"),
    Rule("GW353", "warning", balance_loss_grows_with_ranks, f"{_AUX}; huggingface/transformers#48690"),
    Rule("GW354", "note", balance_loss_pools_layers, f"{_AUX}; huggingface/transformers#28255 and #31464"),
    Rule("GW355", "warning", balance_loss_of_this_family_is_none, f"{_AUX}, 15 families audited"),
    Rule("GW356", "warning", correction_bias_is_never_updated, f"{_AUX}; bias moved 0.0 in 20 steps of glm4_moe"),
    Rule("GW357", "error", reentrant_checkpointing_drops_the_gradient, f"{_AUX}, 15 families audited", safe=True),
    Rule("GW358", "error", force_balancing_left_on, "AMD-AGI/Primus, examples/megatron SFT recipes", safe=True),
    Rule("GW359", "warning", capacity_drops_tokens, "computed from OLMoE's published counts"),
    Rule("GW360", "note", router_in_half_precision, f"{_AUX}: bf16 against fp32 routing of 64 to 256 experts"),
    Rule("GW361", "warning", trained_router_without_losses, "measured on a small Qwen3-MoE, learning rate × 10"),
    Rule("GW362", "warning", dpo_ignores_the_balance_loss, "huggingface/trl#2197"),
    Rule("GW363", "warning", balance_loss_in_reinforcement_learning, "NVIDIA-NeMo/RL#3169"),
    Rule("GW364", "error", balance_loss_with_4d_mask, f"{_AUX}: 4-D mask and balance loss"),
)
