"""GW3xx: adapters. What a LoRA config really trains on a mixture of experts, and what it says without effect."""

import re

from gatewright.preflight.fault import Fault, Rule, set_to
from gatewright.preflight.job import Job

_MLP = {"gate_proj", "up_proj", "down_proj"}
_FUSED = {"gate_up_proj", "down_proj"}
_ROUTER = {"gate", "router", "mlp.gate", "all-router"}
_ALL = {"all", "all-linear"}


def _targets(job: Job) -> frozenset[str]:
    """Leaf names of the targets, and `all` for every linear layer."""
    names = frozenset(name.rpartition(".")[2] for name in job.lora_targets.get(()))
    return (names | {"all"}) if names & _ALL else names


def _peft(job: Job) -> tuple[int, ...] | None:
    """PEFT's version: said, or pinned by the tool that reads the config."""
    if (said := job.version("peft")) is not None:
        return said
    return (0, 18) if job.uses("llamafactory") else (0, 20) if job.uses("axolotl") else None


def _expert_parameters(job: Job) -> int:
    return job.shape.parameters_by_role().get("routed_experts", 0) if job.shape else 0


def _trains_experts(job: Job) -> bool:
    targets = _targets(job)
    return bool(job.lora_target_parameters.get(())) or ("experts" in targets and job.uses("gatewright"))


def _linear_names(job: Job) -> frozenset[str]:
    if job.shape is None:
        return frozenset()
    return frozenset(linear.name for group in job.shape.groups for linear in group.linears)


def experts_never_train(job: Job) -> Fault | None:
    """Since transformers 5 the routed experts are two fused 3-D parameters and no longer linear modules. PEFT before
    0.19 looks for modules only: names such as up_proj, or all linear layers, give the attention an adapter and the
    experts none, without a word."""
    peft, transformers = _peft(job), job.version("transformers")
    if not (job.moe and job.lora and job.trains) or peft is None or peft >= (0, 19):
        return None
    if transformers is not None and transformers < (5,):  # every expert was a module of its own
        return None
    if not (_targets(job) & (_MLP | {"all"})) or job.lora_target_parameters.get(()) or job.mca.value:
        return None
    experts, total = _expert_parameters(job), job.shape.parameters if job.shape else 1
    return Fault(
        f"{job.lora_targets}: with PEFT {'.'.join(map(str, peft))} the routed experts get no adapter; they are "
        f"{experts / total:.0%} of the model's parameters",
        (job.lora_targets,),
        "use PEFT 0.20 or later with target_parameters [mlp.experts.gate_up_proj, mlp.experts.down_proj], or say "
        "attention only and mean it",
    )


def all_linear_trains_the_router(job: Job) -> Fault | None:
    """From PEFT 0.20 on, `all-linear` puts an adapter on the router too. A router that trains sharpens (its top
    probability rose from 0.40 to 0.61 in 1,000 steps of a small model) and needs a balance loss to stay healthy."""
    peft = _peft(job)
    if (
        not (job.moe and job.lora)
        or "all" not in _targets(job)
        or job.uses("llamafactory", "axolotl", "megatron", "swift-megatron")
    ):
        return None
    if peft is not None and peft < (0, 20):
        return None
    return Fault(
        f"{job.lora_targets} puts an adapter on the router as well (PEFT 0.20 and later)",
        (job.lora_targets,),
        "name the modules: q_proj k_proj v_proj o_proj, and the experts by target_parameters",
    )


def router_in_targets(job: Job) -> Fault | None:
    """An adapter on the router changes which expert sees which token. In adapter training a frozen router costs under
    1 % of cross-entropy and is the only setting without drift at a too high learning rate."""
    named = sorted(_ROUTER & (_targets(job) | set(job.lora_targets.get(()))))
    if not (job.moe and job.lora and named) or job.aux.get(0) > 0:
        return None
    return Fault(
        f"{job.lora_targets.key} names the router ({', '.join(named)}) and no balance loss is on",
        (job.lora_targets,),
        "take the router out, or train it at a tenth of the learning rate with a balance loss",
    )


def dropout_on_target_parameters(job: Job) -> Fault | None:
    """PEFT wraps a fused expert parameter without a place for dropout, and raises when lora_dropout is not 0."""
    if not job.lora_target_parameters.get(()) or not job.lora_dropout.get(0) > 0:
        return None
    return Fault(
        f"{job.lora_dropout} with target_parameters: PEFT raises ValueError before step 1",
        (job.lora_dropout, job.lora_target_parameters),
        "set it to 0",
        set_to(job.lora_dropout, 0),
    )


def dora_on_target_parameters(job: Job) -> Fault | None:
    """DoRA is not written for fused expert parameters; PEFT raises."""
    if not job.lora_target_parameters.get(()) or not job.lora_dora.value:
        return None
    return Fault(
        f"{job.lora_dora} with target_parameters: PEFT raises ValueError before step 1",
        (job.lora_dora, job.lora_target_parameters),
        "use plain LoRA on the experts",
        set_to(job.lora_dora, False),
    )


def half_of_the_gated_mlp(job: Job) -> Fault | None:
    """gate_proj and up_proj are one fused parameter in the experts. From PEFT 0.19 on, naming one of them without the
    other raises."""
    named, peft = _targets(job), _peft(job)
    if not (job.moe and job.lora) or ("gate_proj" in named) == ("up_proj" in named):
        return None
    if peft is None or peft < (0, 19):
        return None
    has, lacks = ("gate_proj", "up_proj") if "gate_proj" in named else ("up_proj", "gate_proj")
    return Fault(
        f"{job.lora_targets.key} has {has} and not {lacks}: they are one fused parameter, and PEFT raises",
        (job.lora_targets,),
        f"add {lacks}, or take {has} out",
    )


def expert_index_matches_nothing(job: Job) -> Fault | None:
    """A target such as `experts.0.up_proj`, or a pattern over expert numbers, is from the time when every expert was a
    module of its own. In transformers 5 no such module exists and it matches nothing."""
    old = [name for name in job.lora_targets.get(()) if re.search(r"experts\W*(\\d|\d|\[0-9)", name)]
    if not (old and job.moe):
        return None
    return Fault(
        f"{job.lora_targets.key} has {old[0]!r}: experts are fused in transformers 5, so no module has a number",
        (job.lora_targets,),
        "use target_parameters: mlp.experts.gate_up_proj and mlp.experts.down_proj",
    )


def target_matches_nothing(job: Job) -> Fault | None:
    """A target that no module has is passed over where another one matches: part of what was meant to train does
    not."""
    names = _linear_names(job) | _MLP
    if job.shape is None or not job.lora or job.uses("gatewright", "megatron", "swift-megatron"):
        return None
    plain = [name for name in job.lora_targets.get(()) if re.fullmatch(r"[A-Za-z_][\w.]*", name)]
    known = names | _ROUTER | {"all", "all-linear", "all-embedding", "embed_tokens", "lm_head", "qkv_proj"}
    missing = [name for name in plain if name.rpartition(".")[2] not in known]
    if not missing:
        return None
    return Fault(
        f"{job.lora_targets.key} names {', '.join(missing)}, which {job.shape.name} does not have "
        f"(it has {', '.join(sorted(names - _MLP)[:8])})",
        (job.lora_targets,),
        "take the name out, or write the one this model uses",
    )


def rank_pattern_matches_nothing(job: Job) -> Fault | None:
    """A rank pattern whose key matches no targeted module is ignored: the module trains at the common rank."""
    names = _linear_names(job) | _MLP
    keys = job.lora_rank_pattern.get(())
    missing = [key for key in keys if not any(name in key or key in name for name in names)]
    if not (names - _MLP) or not missing:
        return None
    return Fault(
        f"{job.lora_rank_pattern.key} has {', '.join(missing)}, which matches no module of {job.model.value}",
        (job.lora_rank_pattern,),
        "write the module's own name",
    )


def experts_stay_in_16_bits(job: Job) -> Fault | None:
    """bitsandbytes replaces linear modules. Fused experts are parameters, so a 4-bit load leaves them in bf16: most of
    a mixture of experts is then four times larger than planned."""
    experts = _expert_parameters(job)
    if job.bits.value not in (4, 8) or not job.moe or job.quantize_experts.value or job.uses("megatron"):
        return None
    return Fault(
        f"{job.bits.key} at {job.bits.value} bits: the fused experts stay in bf16, {2 * experts / 2**30:.0f} GiB "
        f"where 4 bits would take {0.56 * experts / 2**30:.0f}",
        (job.bits,),
        "in axolotl add quantize_moe_experts: true; else load in bf16 and shard, or use a model with 4-bit experts",
    )


def quantized_experts_need_cuda(job: Job) -> Fault | None:
    """axolotl's quantize_moe_experts is written for CUDA only."""
    if not job.quantize_experts.value or not job.amd:
        return None
    return Fault(
        f"{job.quantize_experts} on {job.card}: it runs on CUDA only",
        (job.quantize_experts,),
        "load in bf16 and shard the experts",
        set_to(job.quantize_experts, False),
    )


def quantized_experts_with_deepspeed(job: Job) -> Fault | None:
    """axolotl marks quantize_moe_experts as untested with DeepSpeed."""
    if not job.quantize_experts.value or job.backend.value != "deepspeed":
        return None
    return Fault(
        f"{job.quantize_experts} together with DeepSpeed, where it is untested",
        (job.quantize_experts, job.backend),
        "use FSDP2, or one GPU",
    )


def adapter_on_tied_embedding(job: Job) -> Fault | None:
    """Where the head is the embedding, LoRA on either merges wrong: logits differ by 10 to 1,000 after the merge, with
    a warning at most. Whole copies in modules_to_save are right."""
    named = sorted({"embed_tokens", "lm_head"} & _targets(job))
    if not named or job.shape is None or not job.shape.tied:
        return None
    return Fault(
        f"{job.lora_targets.key} has {', '.join(named)}, and {job.shape.name} ties its head to its embedding: "
        "the merge is wrong",
        (job.lora_targets,),
        "move the names to modules_to_save",
    )


def expert_adapter_without_checkpointing(job: Job) -> Fault | None:
    """PEFT builds W + BA for all experts in the forward pass and keeps it for the backward one: a second copy of every
    expert, unless the layer is recomputed."""
    if not (job.moe and _trains_experts(job)) or job.checkpointing.value is not False or job.uses("gatewright"):
        return None
    return Fault(
        f"{job.checkpointing} with an adapter on the experts: PEFT keeps a second copy of them, "
        f"{2 * _expert_parameters(job) / 2**30:.0f} GiB",
        (job.checkpointing, job.lora_target_parameters),
        "switch gradient checkpointing on",
        set_to(job.checkpointing, True),
    )


def batched_mm_experts(job: Job) -> Fault | None:
    """batched_mm copies the weights of every chosen expert for every token: 8 times the expert weights were kept in a
    small model, and it was 51 times slower than grouped_mm."""
    if job.experts_kernel.value != "batched_mm" or not job.trains:
        return None
    return Fault(
        f"{job.experts_kernel}: it gathers expert weights for each token and is not meant for training",
        (job.experts_kernel,),
        "use grouped_mm",
        set_to(job.experts_kernel, "grouped_mm"),
    )


def eager_experts_that_train(job: Job) -> Fault | None:
    """With eager experts each expert's backward writes a zeroed gradient of the whole stack: the cost grows with the
    square of the number of experts (50 times grouped_mm at 64 experts, measured on a CPU)."""
    if job.experts_kernel.value != "eager" or not job.moe or (job.lora and not _trains_experts(job)):
        return None
    experts = job.shape.experts if job.shape else 0
    return Fault(
        f"{job.experts_kernel} with {experts} experts that train: the backward pass costs O(experts²)",
        (job.experts_kernel,),
        "use grouped_mm",
        set_to(job.experts_kernel, "grouped_mm"),
    )


def expert_adapter_is_large(job: Job) -> Fault | None:
    """An adapter on every expert is not small: it has a pair of matrices for each of them. Its optimizer state can
    outweigh the rest of the run."""
    if not (job.moe and job.lora and _trains_experts(job)) or job.shape is None or job.lora_rank.value is None:
        return None
    rank = job.lora_rank.value
    count = job.expert_share.get(1.0) * sum(
        linear.lora_parameters(rank)
        for group in job.shape.groups
        if group.role == "routed_experts"
        for linear in group.linears
    )
    if 12 * count < 4e9:
        return None
    return Fault(
        f"{job.lora_rank} on {job.shape.experts} experts a layer: {count / 1e9:.2f} B trained parameters, "
        f"{12 * count / 1e9:.0f} GB with fp32 moments",
        (job.lora_rank,),
        "take a lower rank for the experts, or shard the optimizer's state",
    )


def all_linear_splits_into_letters(job: Job) -> Fault | None:
    """PEFT 0.19.1 takes the text all-linear for a list of letters on models with fused experts, and crashes."""
    if _peft(job) != (0, 19, 1) or not job.moe or "all-linear" not in job.lora_targets.get(()):
        return None
    return Fault(
        f"{job.lora_targets} with PEFT 0.19.1: it is split into letters, and PEFT raises",
        (job.lora_targets, job.versions["peft"]),
        "use PEFT 0.20 or later",
        set_to(job.versions["peft"], "0.20.0"),
    )


def attention_only_on_experts(job: Job) -> Fault | None:
    """On a mixture of experts most of the capacity is in the experts: attention alone reached a cross-entropy of 2.18
    where attention and experts reached 1.73 (a small model, equal rank)."""
    targets = _targets(job)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "linear_qkv", "linear_proj", "attention"}
    if not (job.moe and job.lora and job.trains and targets) or targets - attention or _trains_experts(job):
        return None
    return Fault(
        f"{job.lora_targets.key} has attention only; the experts, "
        f"{_expert_parameters(job) / (job.shape.parameters if job.shape else 1):.0%} of the parameters, do not train",
        (job.lora_targets,),
        "add the experts if the task needs new knowledge; keep it if memory decides",
    )


def rank_that_grouped_mm_refuses(job: Job) -> Fault | None:
    """grouped_mm wants rows of 16 bytes: a rank that is no multiple of 8 fails in bf16. Gatewright pads it inside."""
    rank = job.lora_rank
    pads = job.tools == {"gatewright"}
    if pads or not (job.moe and _trains_experts(job)) or rank.get(8) % 8 == 0:
        return None
    return Fault(
        f"{rank} on fused experts: grouped_mm takes multiples of 8 in bf16",
        (rank,),
        f"use {-(-rank.get(8) // 8) * 8}",
        set_to(rank, -(-rank.get(8) // 8) * 8),
    )


_FUSED_LORA = "measured with transformers 5.24 and PEFT 0.18.1 to 0.21.2"
RULES = (
    Rule("GW301", "error", experts_never_train, f"{_FUSED_LORA}; hiyouga/LLaMA-Factory#8075; huggingface/peft#2638"),
    Rule("GW302", "warning", all_linear_trains_the_router, _FUSED_LORA),
    Rule("GW303", "warning", router_in_targets, "measured on a small Qwen3-MoE; DenseMixer's table; Unsloth's default"),
    Rule("GW304", "error", dropout_on_target_parameters, f"{_FUSED_LORA}; PEFT ParamWrapper", safe=True),
    Rule("GW305", "error", dora_on_target_parameters, f"{_FUSED_LORA}; PEFT ParamWrapper"),
    Rule("GW306", "error", half_of_the_gated_mlp, _FUSED_LORA),
    Rule("GW307", "error", expert_index_matches_nothing, _FUSED_LORA),
    Rule("GW308", "warning", target_matches_nothing, "axolotl 0.19 merge-lora: adapters whose keys match nothing"),
    Rule("GW309", "warning", rank_pattern_matches_nothing, "PEFT LoraConfig.rank_pattern"),
    Rule("GW310", "warning", experts_stay_in_16_bits, "axolotl#3374; bitsandbytes#1849; unsloth#4032 and #5344"),
    Rule("GW311", "error", quantized_experts_need_cuda, "axolotl 0.19, quantize_moe_experts; axolotl#3439"),
    Rule("GW312", "warning", quantized_experts_with_deepspeed, "axolotl 0.19, quantize_moe_experts; axolotl#3439"),
    Rule("GW313", "error", adapter_on_tied_embedding, "measured with PEFT 0.21.2, merge of tied models"),
    Rule("GW314", "warning", expert_adapter_without_checkpointing, f"{_FUSED_LORA}; huggingface/peft#2912"),
    Rule("GW315", "error", batched_mm_experts, "measured with transformers 5.24 and PEFT 0.21.2", safe=True),
    Rule("GW316", "warning", eager_experts_that_train, "measured with transformers 5.24 on a CPU", safe=True),
    Rule(
        "GW317", "note", expert_adapter_is_large, "arithmetic: rank × (inputs + outputs) × experts × layers × 12 bytes"
    ),
    Rule("GW318", "error", all_linear_splits_into_letters, _FUSED_LORA),
    Rule("GW319", "note", attention_only_on_experts, "measured on a small Qwen3-MoE; axolotl#3515"),
    Rule(
        "GW320", "note", rank_that_grouped_mm_refuses, "measured: torch 2.13 grouped_mm; NeMo AutoModel pads the rank"
    ),
)
