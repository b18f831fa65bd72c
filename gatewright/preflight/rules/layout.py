"""GW1xx: parallel layout, by backend and version. The first rules are the planner's own, asked, not copied."""

from collections.abc import Iterator
from typing import Any

from gatewright.planner.legal import RULES as PLANNER_RULES
from gatewright.planner.legal_advice import ADVICE
from gatewright.preflight.fault import Fault, Judge, Rule, set_to
from gatewright.preflight.job import Job, Written

CODES = {
    "zero3-with-native-moe": "GW101",
    "zero3-with-autoep": "GW102",
    "ranks-divide": "GW103",
    "ep-needs-experts": "GW104",
    "ep-divides-experts": "GW105",
    "ep-divides-ranks": "GW106",
    "fsdp1-with-ep": "GW107",
    "heads-divide": "GW108",
    "tp-within-node": "GW109",
    "etp-only-for-large-experts": "GW110",
    "pp-within-layers": "GW111",
    "pp-needs-micro-batches": "GW112",
    "pp-with-zero23": "GW113",
    "cp-divides-tokens": "GW116",
    "cp-with-eager": "GW117",
    "full-needs-wide-weights": "GW118",
    "eight-bit-with-dtensor": "GW119",
    "four-bit-with-fsdp": "GW120",
    "fp8-without-units": "GW121",
    "ep-across-nodes": "GW122",
    "ep-or-gather": "GW123",
    "zero2-replicates-frozen": "GW124",
    "stage-table": "GW125",
    "cp-through-attention": "GW126",
    "cp-changed-scores": "GW128",
}
"""Rule of planner/legal.py to its code here. Two are left out that no config can break: our run file and
transformers' arguments have no key for a pipeline, nor ours for tensor parallelism."""
COSTLY_ADVICE = frozenset({"four-bit-with-fsdp"})
"""Advice that, not taken, changes what fits."""
_ABOUT = {
    "zero": ("zero",),
    "ep": ("ep",),
    "fsdp1": ("fsdp", "ep"),
    "heads": ("tp",),
    "tp": ("tp",),
    "etp": ("etp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "eight": ("optimizer", "bits", "zero"),
    "four": ("bits", "fsdp"),
    "zero2": ("zero",),
    "stage": ("zero", "fsdp"),
    "ranks": ("tp", "pp", "cp", "ranks"),
}


def _asks(rule: str) -> Judge:
    """A rule that looks up what the planner said."""

    def judge(job: Job) -> Fault | None:
        refusal = next((refusal for refusal in job.refusals if refusal.rule == rule), None)
        if refusal is None:
            return None
        return Fault(refusal.reason, tuple(_said(job, rule)), "", None)

    return judge


def _said(job: Job, rule: str) -> Iterator[Written[Any]]:
    values: dict[str, Written[Any]] = {
        "zero": job.zero,
        "ep": job.ep,
        "tp": job.tp,
        "etp": job.etp,
        "pp": job.pp,
        "cp": job.cp,
        "fsdp": job.fsdp,
        "optimizer": job.optimizer,
        "bits": job.bits,
        "ranks": job.ranks,
    }
    yield from (values[name] for name in _ABOUT.get(rule.split("-")[0], ()) if values[name].given)
    yield job.model


def planner_rules() -> tuple[Rule, ...]:
    advised = {rule.id for rule in ADVICE}
    return tuple(
        Rule(
            CODES[rule.id],
            "error" if rule.id not in advised else "warning" if rule.id in COSTLY_ADVICE else "note",
            _asks(rule.id),
            f"{rule.source} ({rule.holds_for})",
            name=rule.id,
            reason=f"{rule.title[0].upper()}{rule.title[1:]}: a rule of the planner, which says why with the numbers.",
        )
        for rule in PLANNER_RULES
        if rule.id in CODES
    )


def two_engines_shard(job: Job) -> Fault | None:
    """DeepSpeed and FSDP both divide the states; with both configured the trainers stop, or one is ignored."""
    if not job.fsdp.value or job.backend.value != "deepspeed":
        return None
    return Fault(
        f"{job.fsdp.key} and {job.backend.key} are both configured", (job.fsdp, job.backend), "keep one of them"
    )


def zero3_without_leaf_modules(job: Job) -> Fault | None:
    """ZeRO-3 gathers a module's weights when it runs. Ranks that route to different experts gather different ones, and
    hang; DeepSpeed must be told to treat the whole expert block as one (a leaf module)."""
    if job.zero.value != 3 or not job.moe or job.leaf_modules.get(()) or not job.uses("transformers", "trl"):
        return None
    return Fault(
        f"{job.zero} on {job.model.value}: expert blocks are not leaf modules, and ranks may hang in a gather",
        (job.zero, job.model),
        "zero_optimization.leaf_module.classes (DeepSpeed) or deepspeed_moe_layer_cls_names (accelerate): the class of "
        "the sparse block",
    )


def zero3_recomputes_frozen_weights(job: Job) -> Fault | None:
    """With frozen weights and recomputation ZeRO-3 had released the weight by the time it was recomputed: `saved [128],
    recomputed [0]`."""
    version = job.version("deepspeed")
    if job.zero.value != 3 or not job.lora or job.checkpointing.value is not True or job.reentrant.value:
        return None
    if not job.uses("transformers", "trl", "axolotl", "swift", "llamafactory") or (
        version is not None and version > (0, 19, 6)
    ):
        return None
    return Fault(
        f"{job.zero} with an adapter and recomputation: DeepSpeed to 0.19.6 may stop with CheckpointError",
        (job.zero, job.checkpointing),
        "take a DeepSpeed with pull request 8148, or ZeRO-2 where the frozen weights fit",
    )


def fsdp2_saves_one_shard_of_the_adapter(job: Job) -> Fault | None:
    """accelerate before 1.15 writes only rank 0's shard of an adapter under FSDP2 with FULL_STATE_DICT: the file loads,
    and most of the training is not in it."""
    pinned = (1, 13) if job.uses("axolotl") else (1, 11) if job.uses("llamafactory") else None
    version = job.version("accelerate") or pinned
    if not job.lora or not job.fsdp.value or job.fsdp_version.get(1) != 2 or version is None or version >= (1, 15):
        return None
    if job.fsdp_state_dict.get("FULL_STATE_DICT").upper() != "FULL_STATE_DICT":
        return None
    return Fault(
        f"FSDP2 with accelerate {'.'.join(map(str, version))}: only rank 0's shard of the adapter is saved",
        (job.fsdp_version, job.fsdp_state_dict),
        "use accelerate 1.15 or later, or SHARDED_STATE_DICT",
        set_to(job.fsdp_state_dict, "SHARDED_STATE_DICT"),
    )


def axolotl_ep_with_tensor_parallelism(job: Job) -> Fault | None:
    """axolotl's expert parallelism raises NotImplementedError beside tensor parallelism."""
    if not job.uses("axolotl") or job.ep.get(1) < 2 or job.tp.get(1) < 2:
        return None
    return Fault(
        f"{job.ep} and {job.tp}: axolotl does not combine them",
        (job.tp, job.ep),
        "set tensor_parallel_size to 1",
        set_to(job.tp, 1),
    )


def deepep_on_amd(job: Job) -> Fault | None:
    """DeepEP is built for NVLink between Ampere or Hopper GPUs."""
    axolotl = job.uses("axolotl") and job.ep.get(1) > 1
    if not job.amd or not (job.dispatcher.get("").replace("_", "") == "deepep" or axolotl):
        return None
    return Fault(
        f"{job.dispatcher if job.dispatcher.given else job.ep} needs DeepEP, which does not run on {job.card}",
        (job.dispatcher if job.dispatcher.given else job.ep,),
        "use the all-to-all dispatcher",
    )


def deepep_across_nodes(job: Job) -> Fault | None:
    """DeepEP over two nodes ended in CPU time-outs; NVIDIA's own recipes moved to HybridEP above 8 ranks."""
    per_node = job.gpus_per_node.value or job.launcher_processes.value or 8
    if job.dispatcher.get("").replace("_", "") != "deepep" or job.ep.get(1) <= per_node:
        return None
    return Fault(
        f"{job.ep} over nodes of {per_node} GPUs with DeepEP: its CPU threads time out",
        (job.ep, job.dispatcher),
        "keep ep in the node, or use hybridep",
    )


def tensor_parallel_experts(job: Job) -> Fault | None:
    """For experts EP beats TP: whole experts on a rank have larger products, and one exchange instead of two."""
    if not job.moe or job.tp.get(1) < 2 or job.ep.get(1) > 1 or not job.uses("megatron", "swift-megatron"):
        return None
    return Fault(
        f"{job.tp} and no expert parallelism: experts are cut by TP",
        (job.tp,),
        f"use expert_model_parallel_size {job.tp.value} and TP for the attention only where it must be",
    )


def dynamic_cp_with_pipeline(job: Job) -> Fault | None:
    """Megatron's dynamic context parallelism asserts a pipeline of one."""
    if not job.dynamic_cp.value or job.pp.get(1) < 2:
        return None
    return Fault(f"{job.dynamic_cp} with {job.pp}", (job.pp, job.dynamic_cp), "set it to 1", set_to(job.pp, 1))


def dynamic_cp_without_per_token_loss(job: Job) -> Fault | None:
    """Where CP changes with the micro-batch, ranks hold different numbers of tokens: the loss must be a mean over
    tokens, and Megatron asserts it."""
    if not job.dynamic_cp.value or job.per_token_loss.value:
        return None
    return Fault(
        f"{job.dynamic_cp} without --calculate-per-token-loss",
        (job.dynamic_cp,),
        "add --calculate-per-token-loss",
    )


def dynamic_cp_with_latent_attention(job: Job) -> Fault | None:
    """Megatron's dynamic context parallelism does not support MLA."""
    latent = job.shape is not None and any(
        layer.attention is not None and layer.attention.kind in ("latent", "sparse_latent")
        for layer in job.shape.layers
    )
    if not job.dynamic_cp.value or not latent:
        return None
    return Fault(
        f"{job.dynamic_cp} on {job.model.value}, whose attention is MLA",
        (job.dynamic_cp, job.model),
        "use a fixed context-parallel size",
    )


def ddp_with_idle_experts(job: Job) -> Fault | None:
    """An expert without tokens gets no gradient; DDP then waits for it and raises, unless it looks for unused
    parameters."""
    if job.find_unused.value is not False or not job.find_unused.given or not job.moe:
        return None
    if job.zero.get(0) > 0 or job.fsdp.value or (job.world or 2) < 2:
        return None
    return Fault(
        f"{job.find_unused} on {job.model.value}: an expert without tokens stops DDP",
        (job.find_unused,),
        "set it to true",
        set_to(job.find_unused, True),
    )


def mca_with_an_adapter(job: Job) -> Fault | None:
    """LLaMA-Factory's Megatron backend trains all weights only."""
    if not job.mca.value or not job.lora:
        return None
    return Fault(
        f"{job.mca} with {job.adapter if job.adapter.given else 'an adapter'}: this backend has no adapters",
        (job.mca, job.adapter),
        "use finetuning_type: full, or leave use_mca out",
    )


def mca_pads_under_ep(job: Job) -> Fault | None:
    """With expert parallelism LLaMA-Factory's Megatron backend pads every row to cutoff_len."""
    if not job.mca.value or job.ep.get(1) < 2 or job.packing.value:
        return None
    return Fault(
        f"{job.mca} with {job.ep}: every row is padded to {job.max_tokens.get(0):,} tokens",
        (job.ep, job.max_tokens),
        "pack (neat_packing)",
    )


def ram_efficient_without_sync(job: Job) -> Fault | None:
    """FSDP1 with cpu_ram_efficient_loading reads weights on rank 0 only; without sync_module_states the other ranks
    train random ones."""
    if not job.fsdp_ram_efficient.value or job.fsdp_sync.value is not False or job.fsdp_version.get(1) != 1:
        return None
    return Fault(
        f"{job.fsdp_ram_efficient} and {job.fsdp_sync}: only rank 0 has the weights",
        (job.fsdp_sync, job.fsdp_ram_efficient),
        "set it to true",
        set_to(job.fsdp_sync, True),
    )


def mixture_on_zero(job: Job) -> Fault | None:
    """ZeRO-3 gathers every expert of a layer for every micro-batch: Qwen3-30B-A3B took 91 s a step on 16 A800, and
    9.6 s with expert parallelism."""
    if job.zero.value != 3 or not job.moe or not job.full or job.ep.get(1) > 1 or (job.world or 1) < 8:
        return None
    return Fault(
        f"{job.zero} gathers all {job.shape.experts if job.shape else 0} experts of a layer in every pass",
        (job.zero, job.model),
        "use expert parallelism (Megatron-SWIFT, AutoEP, FSDP2 with EP)",
    )


RULES = (
    *planner_rules(),
    Rule("GW131", "error", two_engines_shard, "axolotl 0.19: check_fsdp_deepspeed"),
    Rule("GW132", "warning", zero3_without_leaf_modules, "deepspeedai/DeepSpeed#7461; hiyouga/LLaMA-Factory#2315"),
    Rule("GW133", "note", zero3_recomputes_frozen_weights, "deepspeedai/DeepSpeed#8148"),
    Rule("GW135", "error", fsdp2_saves_one_shard_of_the_adapter, "huggingface/accelerate#4206"),
    Rule("GW136", "error", axolotl_ep_with_tensor_parallelism, "axolotl 0.19, integrations/expert_parallel", safe=True),
    Rule("GW137", "error", deepep_on_amd, "axolotl 0.19, integrations/expert_parallel; DeepEP README"),
    Rule("GW138", "warning", deepep_across_nodes, "NVIDIA-NeMo/Automodel#2546 and #2789"),
    Rule("GW139", "note", tensor_parallel_experts, "Megatron-Core MoE README"),
    Rule("GW140", "error", dynamic_cp_with_pipeline, "Megatron-LM, arguments.py; pull request 5679"),
    Rule("GW141", "error", dynamic_cp_without_per_token_loss, "Megatron-LM, arguments.py"),
    Rule("GW142", "error", dynamic_cp_with_latent_attention, "Megatron-LM, pull request 5679"),
    Rule("GW143", "warning", ddp_with_idle_experts, "hiyouga/LLaMA-Factory#3102"),
    Rule("GW144", "error", mca_with_an_adapter, "LLaMA-Factory 0.9.5, use_mca"),
    Rule("GW145", "warning", mca_pads_under_ep, "LLaMA-Factory 0.9.5, use_mca"),
    Rule("GW146", "error", ram_efficient_without_sync, "accelerate 1.15, FullyShardedDataParallelPlugin", safe=True),
    Rule("GW147", "note", mixture_on_zero, "modelscope/ms-swift docs, Megatron-SWIFT; QwenLM/Qwen3-VL#1619"),
)
