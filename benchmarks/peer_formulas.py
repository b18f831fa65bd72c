"""Memory formulas that other tools publish, written anew from their sources; each returns bytes, or None to abstain."""

from gatewright.planner.job import Job
from gatewright.spec.shape import Mlp

SHARDED = ("zero2", "zero3", "fsdp1", "fsdp2")


def hf_vram_calc(job: Job) -> float | None:
    """hf-vram-calc 1.0.9: weights × 4 × 1.3 to train, (weights + adapter × 8 B) × 1.2 for LoRA; no batch, no ZeRO."""
    layout = job.layout
    if layout.sharding in (*SHARDED, "zero1") or job.offload:
        return None
    parameters = job.shape.parameters
    divisor = layout.tp * layout.pp * layout.ep
    if job.method == "full":
        return parameters * 2 * 4 * 1.3 / divisor
    assert job.adapter is not None
    weight = 0.5 if job.method == "qlora" else 2.0
    adapter = 0.25 * parameters * 2 * job.adapter.rank / 4096
    return (parameters * weight + adapter * 8) * 1.2 / divisor


def accelerate(job: Job) -> float | None:
    """accelerate estimate-memory, training with Adam in 16 bits: 8 bytes a parameter on one device."""
    if job.method != "full" or job.layout.ranks != 1 or job.offload:
        return None
    return 8.0 * job.shape.parameters


def deepspeed(job: Job) -> float | None:
    """DeepSpeed's estimate_zero2/3_model_states_mem_needs without offload; FSDP counts as ZeRO-3."""
    layout = job.layout
    if job.method != "full" or layout.sharding not in SHARDED or layout.tp * layout.pp != 1 or job.offload:
        return None
    parameters = job.shape.parameters
    if layout.sharding == "zero2":
        return 4.0 * parameters + 16.0 * parameters / layout.ranks
    largest = max(
        (linear.weights / linear.copies for group in job.shape.groups for linear in group.linears),
        default=0.0,
    )
    largest = max(largest, job.shape.vocab * job.shape.hidden)
    return 4.0 * largest + 18.0 * parameters / layout.ranks


def megatron(job: Job) -> float | None:
    """Megatron-LM theoretical_memory_usage.py: 18 or 6 + 12/dp bytes a parameter, sbh(18 + 4 ffn/h) a layer."""
    layout, shape = job.layout, job.shape
    if job.method != "full" or not job.framework.startswith("megatron") or job.offload:
        return None
    experts = sum(group.parameters for group in shape.groups if group.role == "routed_experts")
    outside = sum(group.parameters for group in shape.groups if group.layer is None and group.role != "vision")
    blocks = shape.parameters - experts - outside

    def per_parameter(ranks: int) -> float:
        return 6 + 12 / ranks if layout.sharding == "zero1" else 18.0

    dense = (blocks / layout.pp + outside / (1 if layout.pp == 1 else 2)) / layout.tp
    states = dense * per_parameter(layout.dp)
    states += experts / (layout.pp * layout.ep * layout.etp) * per_parameter(layout.expert_shards)
    tokens = job.rows * job.row_tokens
    layers = sum(18 + 4 * inner_width(layer.mlp) / shape.hidden for layer in shape.layers)
    activations = tokens * shape.hidden * layers
    activations += 8 * tokens * layout.pp + tokens * shape.hidden * layout.pp
    if layout.virtual_stages > 1:
        activations *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual_stages)
    if layout.pp == 1:
        activations += tokens * shape.hidden * 4 * (1 + shape.vocab / shape.hidden)
    return states + activations / layout.tp


def inner_width(mlp: Mlp | None) -> float:
    """Inner width that one token uses."""
    if mlp is None:
        return 0.0
    return mlp.width if mlp.kind == "dense" else mlp.width * mlp.top_k + mlp.shared_width


PEERS = {
    "hf-vram-calc formula": hf_vram_calc,
    "accelerate formula": accelerate,
    "DeepSpeed formula": deepspeed,
    "Megatron-LM formula": megatron,
}
