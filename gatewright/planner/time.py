"""Step time: matrix products, memory traffic and communication against a GPU's rates, with a stated efficiency."""

import math
from collections import Counter
from dataclasses import dataclass, replace

from gatewright.packing.flops import ATTENTION_PASSES, ModelFlops
from gatewright.planner.job import Job
from gatewright.planner.memory_gather import trained_bytes
from gatewright.planner.memory_states import Share, kinds_of, shares, states, weight_bytes
from gatewright.planner.policy import find_policy
from gatewright.spec.hardware import Cluster
from gatewright.spec.plan import TimeEstimate
from gatewright.spec.shape import ModelShape, TensorGroup

B = 2
"""Bytes of an activation."""
FULLY_SHARDED = ("zero3", "fsdp1", "fsdp2")
LINK_EFFICIENCY = 0.7
"""Share of a link's peak that NCCL and RCCL reach on large messages (nccl-tests bus bandwidth against data sheets)."""
HIDDEN_BY_COMPUTE = 0.8
"""Share of the compute time behind which weight gathers and gradient reductions can hide (prefetch of one block)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of the peak bf16 rate that matrix products of a training step reach."""

    share: float
    source: str


EFFICIENCY: dict[tuple[str, bool], Efficiency] = {
    ("nvidia", False): Efficiency(share=0.40, source="dense training on H100 is published at 35 to 50 %"),
    ("nvidia", True): Efficiency(share=0.25, source="mixtures of experts on H100 are published at 15 to 35 %"),
    ("amd", False): Efficiency(share=0.35, source="dense training on MI250X and MI300X is published at 30 to 40 %"),
    ("amd", True): Efficiency(share=0.20, source="taken as for NVIDIA: grouped products lose half of the dense share"),
}
"""By (vendor, mixture of experts): an assumption to be replaced by a measured step (`calibrated`)."""


def estimate_time(
    job: Job, cluster: Cluster, *, tokens_per_step: int, efficiency: Efficiency | None = None
) -> TimeEstimate:
    """One optimizer step over `tokens_per_step` tokens on all ranks, in seconds, term by term."""
    gpu, layout = cluster.gpu, job.layout
    known = efficiency or EFFICIENCY[("amd" if gpu.vendor == "amd" else "nvidia", job.shape.is_moe)]
    rate = gpu.bf16_flops_per_s * known.share
    products, attention, again = flops_per_token(job)
    per_rank = tokens_per_step / layout.ranks
    busy = 1.0 if layout.sharding != "pipeline_naive" else float(layout.pp)
    terms = [
        ("matrix products", products * per_rank * busy / rate),
        ("attention", attention * per_rank * busy / rate),
        ("recomputation", again * per_rank * busy / rate),
    ]
    compute = sum(seconds for _, seconds in terms)
    micro_batches = max(1.0, per_rank * layout.tp * layout.cp * layout.pp / job.micro_batch_tokens)
    terms.append(("weights from memory", max(0.0, weight_traffic_s(job, cluster) * micro_batches - compute)))
    terms.append(("optimizer", optimizer_s(job, cluster)))
    gather = gather_s(job, cluster) * micro_batches + reduce_s(job, cluster)
    terms.append(("gathers and reductions", max(0.05 * gather, gather - HIDDEN_BY_COMPUTE * compute)))
    terms.append(("all-to-all", all_to_all_s(job, cluster) * micro_batches))
    terms.append(("tensor parallel", tensor_parallel_s(job, cluster) * micro_batches))
    terms.append(("context exchange", context_s(job, cluster) * micro_batches))
    if layout.pp > 1 and layout.sharding != "pipeline_naive":
        bubble = (layout.pp - 1) / (micro_batches * layout.virtual_stages)
        terms.append(("pipeline bubble", compute * bubble))
    return TimeEstimate(
        terms=tuple((name, seconds) for name, seconds in terms if seconds > 0),
        tokens_per_step=tokens_per_step,
        gpus=layout.ranks,
        flops_per_step=(products + attention) * tokens_per_step,
        efficiency=known.share,
        efficiency_source=known.source,
    )


def model_flops(job: Job) -> ModelFlops:
    """What training takes, recomputation not counted.

    The backward pass costs twice the forward where weights train; a frozen weight needs the input's gradient only,
    once. Attention's backward costs 2.5 forwards with a fused kernel, which recomputes the scores.
    """
    forward, adapters = forward_flops(job)
    backward = 2.0 if job.method == "full" else 1.0
    mixers = Counter(layer.attention for layer in job.shape.layers if layer.attention is not None)
    return ModelFlops(
        products=forward * (1 + backward) + 3 * adapters,
        mixers=tuple((layers, mixer) for mixer, layers in mixers.items()),
    )


def forward_flops(job: Job) -> tuple[float, float]:
    """Forward FLOPs of one token: in the model's matrices, and in the adapters beside them."""
    shape = job.shape
    kinds = kinds_of(shape)
    counts = Counter(index for block in kinds.blocks for index in block)
    counts.update(kinds.outside)
    forward = float(sum(count * group_flops(kinds.groups[index]) for index, count in counts.items()))
    if shape.tied:
        forward += 2 * shape.vocab * shape.hidden
    if job.adapter is None:
        return forward, 0.0
    adapters = sum(
        job.adapter.share(group.role, linear.name)
        * (2 * job.adapter.rank * (linear.inputs + linear.outputs) * linear.active)
        for group, linear in shape.linears(job.adapter.roles)
    )
    return forward, adapters


def flops_per_token(job: Job) -> tuple[float, float, float]:
    """(matrix products, attention, recomputation): forward and backward of one token."""
    flops = model_flops(job)
    forward, adapters = forward_flops(job)
    attention = flops.attention(job.attention_tokens or job.tokens_per_row)
    head = 2 * job.shape.vocab * job.shape.hidden
    repeated = {"none": 0.0, "per_op": 0.3, "alternate": 0.5, "full": 1.0}[job.checkpointing]
    again = repeated * (forward - head + attention + adapters)
    return flops.products, attention * ATTENTION_PASSES, again


def knee_tokens(shape: ModelShape, *, tokens: int = 8192) -> int:
    """Length of a document at which attention costs as much as everything else, in LoRA with full recomputation.

    Attention within a window, or over compressed keys, is taken as it is at `tokens`, so the knee is farther out.
    """
    job = Job(shape=shape, method="lora", attention_tokens=tokens)
    products, attention, again = flops_per_token(job)
    short = sum(flops_per_token(replace(job, attention_tokens=1)))
    growth = (products + attention + again - short) / tokens
    return max(1, round(short / growth)) if growth > 0 else 10**9


def group_flops(group: TensorGroup) -> int:
    return sum(linear.flops_per_token for linear in group.linears)


def weight_traffic_s(job: Job, cluster: Cluster) -> float:
    """Seconds to read this rank's weights three times, forward, recomputation and backward, for one micro-batch."""
    policy = find_policy(job.framework)
    held = shares(job, policy, 0).shares
    passes = 3 if job.checkpointing == "full" else 2
    size = sum(weight_bytes(job, policy, item) * item.count for item in held if item.group.layer is not None)
    return passes * size / cluster.gpu.bandwidth_bytes_per_s


def optimizer_s(job: Job, cluster: Cluster) -> float:
    """The update reads and writes weights, gradients and state once."""
    policy = find_policy(job.framework)
    own = states(job, policy, shares(job, policy, 0))
    return 2 * (own.trained_weights + own.adapters + own.grads + own.optimizer) / cluster.gpu.bandwidth_bytes_per_s


def transfer_s(cluster: Cluster, group: int, size: float) -> float:
    """Seconds for a rank to send `size` bytes within a group of neighbouring ranks."""
    return size / (cluster.slowest_link_bytes_per_s(group) * LINK_EFFICIENCY)


def gather_s(job: Job, cluster: Cluster) -> float:
    """FSDP and ZeRO-3 gather the weights for the forward and again for the backward pass of each micro-batch."""
    layout = job.layout
    if layout.sharding not in FULLY_SHARDED or layout.shards == 1:
        return 0.0
    policy = find_policy(job.framework)
    trained = trained_bytes(job, policy)

    def whole(item: Share) -> float:
        if item.trains:
            return item.parameters * trained
        return min(weight_bytes(job, policy, item), item.parameters * B) + item.adapters * trained

    held = [item for item in shares(job, policy, 0).shares if item.shards > 1]
    size = sum(whole(item) * item.count * (1 - 1 / item.shards) for item in held)
    return transfer_s(cluster, layout.ranks, 2 * size)


def reduce_s(job: Job, cluster: Cluster) -> float:
    """Gradients travel once a step: reduce-scatter where they are sharded, all-reduce (twice the bytes) where not."""
    layout = job.layout
    if layout.dp * layout.cp == 1:
        return 0.0
    policy = find_policy(job.framework)
    types = policy.trained(job)
    times = 1 if layout.sharding in ("zero2", *FULLY_SHARDED) else 2
    held = shares(job, policy, 0).shares
    size = sum((item.parameters if item.trains else item.adapters) * item.count for item in held) * types.grad
    return transfer_s(cluster, layout.ranks, times * size)


def all_to_all_s(job: Job, cluster: Cluster) -> float:
    """Tokens to their experts and back, in the forward, the recomputed forward and the backward pass."""
    layout, shape = job.layout, job.shape
    if layout.ep == 1:
        return 0.0
    passes = 6 if job.checkpointing == "full" else 4
    visits = sum(layer.mlp.top_k for layer in shape.layers if layer.mlp and layer.mlp.experts) / layout.pp
    tokens = job.micro_batch_tokens / (layout.tp if layout.sequence_parallel else 1)
    size = passes * visits * tokens * shape.hidden * B * (1 - 1 / layout.ep) * job.overload
    return transfer_s(cluster, layout.ep, size)


def tensor_parallel_s(job: Job, cluster: Cluster) -> float:
    """Two all-reduces a layer and pass (or the reduce-scatters and gathers that make them up)."""
    layout = job.layout
    if layout.tp == 1:
        return 0.0
    passes = 3 if job.checkpointing == "full" else 2
    size = 2 * passes * 2 * job.micro_batch_tokens * job.shape.hidden * B * (1 - 1 / layout.tp)
    return transfer_s(cluster, layout.tp, size * len(job.shape.layers) / layout.pp)


def context_s(job: Job, cluster: Cluster) -> float:
    """Keys and values go round the ring, with their gradients in the backward pass."""
    layout = job.layout
    if layout.cp == 1:
        return 0.0
    width = sum(
        (layer.attention.heads if layer.attention.kv_rank else layer.attention.kv_heads)
        * (layer.attention.qk_dim + layer.attention.v_dim)
        for layer in job.shape.layers
        if layer.attention is not None and layer.attention.kind != "linear"
    )
    passes = 4 if job.checkpointing == "full" else 3
    size = passes * job.micro_batch_tokens * width * B * (layout.cp - 1) / layout.pp / layout.tp
    return transfer_s(cluster, layout.tp * layout.cp, size)


def calibrated(job: Job, cluster: Cluster, *, tokens_per_step: int, measured_step_s: float) -> Efficiency:
    """The efficiency at which the estimate meets a measured step.

    Communication and memory terms keep their estimates; what is left is compute. A step faster than those terms
    alone gives their sum's tenth as compute.
    """
    estimate = estimate_time(job, cluster, tokens_per_step=tokens_per_step)
    compute_names = ("matrix products", "attention", "recomputation")
    compute = sum(seconds for name, seconds in estimate.terms if name in compute_names)
    rest = estimate.step_s - compute
    left = max(measured_step_s - rest, 0.1 * measured_step_s)
    share = min(1.0, estimate.efficiency * compute / left) if math.isfinite(left) and left > 0 else estimate.efficiency
    return Efficiency(share=share, source=f"measured: {measured_step_s:.2f} s a step")
