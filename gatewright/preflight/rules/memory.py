"""GW40x: memory, in the planner's numbers."""

from gatewright.planner.search import USABLE
from gatewright.preflight.fault import Fault, Rule, set_to
from gatewright.preflight.job import Job
from gatewright.spec.hardware import GIB


def _usable_bytes(job: Job) -> int:
    return int(job.gpu.memory_bytes * USABLE) if job.gpu else 0


def _filled(job: Job) -> bool:
    """Every micro-batch is as long as the limit says: packed or padded to it, or one row."""
    return bool(job.packing.value or job.pad_to_max.value) or job.uses("megatron", "gatewright")


def _largest_parts(job: Job) -> str:
    assert job.memory is not None
    parts = sorted(job.memory.peak.parts, key=lambda part: -part.bytes)[:3]
    return ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in parts)


def out_of_memory(job: Job) -> Fault | None:
    """The planner's estimate for the most loaded rank is above what the GPU has."""
    if job.memory is None or job.gpu is None or not _filled(job):
        return None
    over = job.memory.device.bytes - _usable_bytes(job)
    if over <= 0:
        return None
    return Fault(
        f"out of memory at the {job.memory.peak.name}, {over / GIB:.1f} GiB short: {job.memory.device.bytes / GIB:.1f} "
        f"of {_usable_bytes(job) / GIB:.1f} GiB on {job.gpu.name} ({_largest_parts(job)} GiB)",
        (job.micro_batch, job.max_tokens, job.model),
        _remedy(job),
    )


def _remedy(job: Job) -> str:
    assert job.memory is not None
    if job.checkpointing.value is not True:
        return "switch gradient checkpointing on"
    if job.memory.peak.name == "loss" and not job.liger.value:
        return "use a loss that keeps no logits (use_liger_kernel, cut_cross_entropy)"
    if job.memory.resident_bytes > 0.6 * _usable_bytes(job):
        return "shard the states over more GPUs (ZeRO-3, FSDP2 or EP): most of it stays from step to step"
    return "take a smaller micro-batch or shorter rows"


def long_rows_out_of_memory(job: Job) -> Fault | None:
    """Without packing the peak follows the longest row: a run goes well for hours, then a micro-batch of long rows
    comes."""
    if job.memory is None or job.gpu is None or _filled(job):
        return None
    over = job.memory.device.bytes - _usable_bytes(job)
    if over <= 0:
        return None
    return Fault(
        f"{job.micro_batch.get(1)} × {job.max_tokens.get(0):,} tokens in one micro-batch are {over / GIB:.1f} GiB "
        f"short at the {job.memory.peak.name} ({_largest_parts(job)} GiB of {_usable_bytes(job) / GIB:.1f})",
        (job.max_tokens, job.micro_batch),
        _remedy(job),
    )


def memory_is_tight(job: Job) -> Fault | None:
    """The estimate fits, but nine runs of ten lie in an interval whose upper end does not."""
    if job.memory is None or job.gpu is None or not _filled(job):
        return None
    device = job.memory.device
    if device.bytes > _usable_bytes(job) or device.high_bytes <= _usable_bytes(job):
        return None
    return Fault(
        f"{device.bytes / GIB:.1f} GiB fit {_usable_bytes(job) / GIB:.1f}, the upper end of the estimate "
        f"({device.high_bytes / GIB:.1f}) does not",
        (job.micro_batch, job.max_tokens),
        "rehearse one step with the longest documents first",
    )


def logits_decide_the_peak(job: Job) -> Fault | None:
    """Logits in fp32 are tokens × vocabulary × 8 to 14 bytes: with a large vocabulary more than the model's layers."""
    if job.memory is None or job.liger.value or job.memory.peak.name != "loss":
        return None
    logits = next((part for part in job.memory.peak.parts if part.name == "logits and loss"), None)
    if logits is None or logits.bytes < 0.25 * job.memory.peak.bytes:
        return None
    return Fault(
        f"logits are {logits.bytes / GIB:.1f} of {job.memory.peak.bytes / GIB:.1f} GiB at the peak "
        f"({job.shape.vocab if job.shape else 0:,} tokens in the vocabulary)",
        (job.micro_batch, job.max_tokens),
        "use a fused head and loss: use_liger_kernel, cut_cross_entropy or enable_liger_kernel",
    )


def eager_attention_on_long_rows(job: Job) -> Fault | None:
    """Eager attention writes every score of a row: heads × tokens² × 2 bytes a layer, and its gradient."""
    shape = job.shape
    if job.attention.value != "eager" or not job.attention.given or shape is None or job.max_tokens.get(0) < 4096:
        return None
    heads = max((layer.attention.heads for layer in shape.layers if layer.attention), default=0)
    size = 2 * heads * job.max_tokens.get(0) ** 2 * job.micro_batch.get(1)
    return Fault(
        f"{job.attention} at {job.max_tokens.value:,} tokens: {size / GIB:.1f} GiB of scores a layer, kept twice",
        (job.attention, job.max_tokens),
        "use flash_attention_2 or sdpa",
    )


def evaluation_batch_larger_than_training(job: Job) -> Fault | None:
    """The Trainer evaluates 8 rows at a time unless told otherwise, with logits: a run that trains with one row a GPU
    dies at its first evaluation."""
    evaluation, training = job.eval_batch, job.micro_batch
    if not job.evaluates.value or evaluation.value is None or not training.given:
        return None
    if evaluation.value <= training.get(1):
        return None
    return Fault(
        f"{evaluation}, {training}: the first evaluation needs more memory than training",
        (evaluation if evaluation.given else training,),
        f"set per_device_eval_batch_size to {training.value}",
        set_to(evaluation, training.value),
    )


def logits_gather_on_the_host(job: Job) -> Fault | None:
    """eval_accumulation_steps moves whole logits to host memory and keeps them all to the end of the evaluation."""
    if not job.eval_accumulation.get(0) > 0:
        return None
    return Fault(
        f"{job.eval_accumulation}: logits of all evaluated tokens are collected in host memory",
        (job.eval_accumulation,),
        "set prediction_loss_only, or reduce them in preprocess_logits_for_metrics",
    )


def offload_needs_host_memory(job: Job) -> Fault | None:
    """Offloaded optimizer state is 12 bytes a trained parameter in host memory (fp32 weights and two moments), shared
    by the ranks of all nodes."""
    if job.offload_optimizer.value != "cpu" or job.memory_bytes.value is None or job.shape is None or not job.full:
        return None
    need = 12 * job.shape.parameters // job.nodes.get(1)
    if need <= job.memory_bytes.value:
        return None
    return Fault(
        f"{job.offload_optimizer}: {need / GIB:.0f} GiB of optimizer state a node, and {job.memory_bytes.key} gives "
        f"{job.memory_bytes.value / GIB:.0f}",
        (job.offload_optimizer, job.memory_bytes),
        "ask for more memory, take more nodes, or train an adapter",
    )


def huge_model_without_expert_parallelism(job: Job) -> Fault | None:
    """Full fine-tuning of a mixture of 600 B parameters or more has 10 TB of states and gathers whole layers of
    experts: no ZeRO stage alone fits a usual number of GPUs."""
    if job.shape is None or not job.moe or not job.full or job.shape.parameters < 6e11 or job.ep.get(1) > 1:
        return None
    return Fault(
        f"all {job.shape.parameters / 1e9:.0f} B parameters of {job.model.value} train without expert parallelism",
        (job.model,),
        "use expert parallelism (Megatron, AutoEP, FSDP2 with an expert mesh), or train an adapter",
    )


_PLANNER = "Gatewright's planner; scored on measured runs in benchmarks/planner_accuracy.py"
RULES = (
    Rule("GW401", "error", out_of_memory, _PLANNER),
    Rule("GW402", "warning", long_rows_out_of_memory, f"{_PLANNER}; meta-llama/llama-cookbook#792"),
    Rule("GW403", "note", memory_is_tight, _PLANNER),
    Rule("GW404", "note", logits_decide_the_peak, _PLANNER),
    Rule("GW405", "warning", eager_attention_on_long_rows, "arithmetic: heads × tokens² × 2 bytes"),
    Rule(
        "GW406",
        "warning",
        evaluation_batch_larger_than_training,
        "huggingface/transformers#8476; MAGICS-LAB/DNABERT_2#78",
    ),
    Rule("GW407", "warning", logits_gather_on_the_host, "huggingface/transformers#25313"),
    Rule("GW408", "error", offload_needs_host_memory, "arithmetic: 12 bytes a parameter; 2U1/Qwen-VL-Finetune#135"),
    Rule("GW409", "error", huge_model_without_expert_parallelism, "arithmetic: 16 bytes a parameter"),
)
