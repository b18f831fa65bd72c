"""What communication keeps on a rank: gathered weights, unsharded gradients, buckets; and dequantised weights."""

from collections.abc import Callable

from gatewright.planner.job import Job
from gatewright.planner.memory_states import EXPERTS, Held, Share, quantizes, weight_bytes
from gatewright.planner.policy import Policy

FULLY_SHARDED = ("zero3", "fsdp1", "fsdp2")
COMPUTE_BYTES = 2
FP32_BYTES = 4


def largest_block(held: Held, size: Callable[[Share], float]) -> float:
    """Sum of `size` over the sharded tensor groups of a block, for the block with the most."""
    sizes = [size(item) if item.shards > 1 else 0.0 for item in held.shares]
    return max((sum(sizes[index] for index in block) for block in held.blocks), default=0.0)


def trained_bytes(job: Job, policy: Policy) -> float:
    """Of a parameter that trains, as it travels."""
    return policy.trained(job).weight if policy.gathers_as_held else COMPUTE_BYTES


def gathered_weight(job: Job, policy: Policy, item: Share) -> float:
    """Full weights of one tensor group as they travel: frozen ones in bf16 or as they are stored in few bits."""
    if item.trains:
        return item.parameters * trained_bytes(job, policy)
    if policy.packed_by_matrix and quantizes(job, item.group):
        stored = (item.parameters - item.matrices) * COMPUTE_BYTES
    else:
        stored = weight_bytes(job, policy, item)
    return stored + item.adapters * trained_bytes(job, policy)


def gathered_bytes(job: Job, policy: Policy, held: Held, *, blocks: float) -> float:
    """Weights that FSDP or ZeRO-3 has gathered: some blocks, and the root unit with embedding and head."""
    if job.layout.sharding not in FULLY_SHARDED:
        return 0.0
    block = gathered_block(job, policy, held)
    outside = [
        gathered_weight(job, policy, item)
        for item in held.shares
        if item.group.layer is None and item.shards > 1 and not (policy.root_released and item.group.role == "head")
    ]
    if job.layout.sharding == "zero3":  # modules are released after use, embedding and head too
        return max([block * blocks, *outside])
    return block * blocks + sum(outside)


def gathered_at_loss(job: Job, policy: Policy, held: Held) -> float:
    """Weights that are gathered when the forward pass ends: the last block and the root unit, or the head alone.

    A head that trains and is gathered for itself is let go before its gradient is at its fullest.
    """
    if not policy.root_released or job.layout.sharding not in FULLY_SHARDED:
        return gathered_bytes(job, policy, held, blocks=1)
    role = "embedding" if job.shape.tied else "head"
    heads = [item for item in held.shares if item.group.role == role and item.shards > 1 and not item.trains]
    return sum(gathered_weight(job, policy, item) for item in heads)


def gathered_block(job: Job, policy: Policy, held: Held) -> float:
    """Full weights of the largest block, where they are sharded."""
    if job.layout.sharding not in FULLY_SHARDED:
        return 0.0
    return largest_block(held, lambda item: gathered_weight(job, policy, item))


def flight_bytes(job: Job, policy: Policy, held: Held) -> float:
    """Unsharded gradients of the block at work, on their way to the ranks that own them."""
    if job.layout.sharding not in FULLY_SHARDED:
        return 0.0
    count = largest_block(held, lambda item: item.parameters if item.trains else item.adapters)
    made = policy.trained(job).grad if policy.gathers_as_held else COMPUTE_BYTES
    return count * (made + policy.reduce_bytes)


def unsharded_grads(job: Job, policy: Policy, held: Held) -> float:
    """Gradients that are whole on every rank between micro-batches."""
    types = policy.trained(job)
    if job.layout.sharding not in FULLY_SHARDED:
        return 0.0
    return sum((item.parameters if item.trains else item.adapters) * item.count * types.grad for item in held.shares)


def bucket_bytes(job: Job, policy: Policy, held: Held) -> float:
    """Flat buffers in which DDP or DeepSpeed reduces gradients."""
    if job.layout.dp * job.layout.cp == 1 or job.layout.sharding in ("fsdp1", "fsdp2", "pipeline_naive"):
        return 0.0
    if job.layout.sharding == "none" and job.method != "full":
        return 0.0
    trained = sum((item.parameters if item.trains else item.adapters) * item.count for item in held.shares)
    return policy.buckets * min(policy.bucket_parameters, trained) * policy.trained(job).grad


def reduction_bytes(job: Job, policy: Policy, held: Held) -> float:
    """Gradients of the largest collective as they were made, and in float32, by tensor and in one piece."""
    alone = job.layout.dp * job.layout.cp == 1 or job.layout.sharding in (*FULLY_SHARDED, "pipeline_naive")
    if alone or not policy.reduction_parameters:
        return 0.0
    trained = sum((item.parameters if item.trains else item.adapters) * item.count for item in held.shares)
    largest = max((largest_tensor(item) for item in held.shares if item.trains), default=0.0)
    each = policy.trained(job).grad + 2 * FP32_BYTES
    return each * min(trained, max(policy.reduction_parameters, largest))


def largest_tensor(item: Share) -> float:
    """Parameters of the largest tensor of a group on this rank; a group without matrices is one tensor."""
    divisor = item.group.parameters / max(item.parameters, 1)
    return max((linear.parameters for linear in item.group.linears), default=item.group.parameters) / divisor


def dequantised_bytes(job: Job, policy: Policy, held: Held) -> float:
    """The largest matrix of a block in the compute type, where weights are in few bits; and its gathered bytes."""
    if job.method == "full":
        return 0.0
    largest = 0.0
    for item in held.shares:
        if not quantizes(job, item.group):
            continue
        divisor = item.group.parameters / max(item.parameters, 1)
        divided = policy.packed_by_matrix and item.shards > 1 and job.layout.sharding in FULLY_SHARDED
        gathered = weight_bytes(job, policy, item) / item.parameters if divided else 0.0
        for linear in item.group.linears:
            one = linear.copies if item.group.role == EXPERTS and policy.experts == "loop" else 1
            largest = max(largest, (COMPUTE_BYTES + gathered) * linear.weights / divisor / one)
    return largest


def visiting_experts(job: Job, policy: Policy, held: Held) -> float:
    """Experts that live on the host come to the device for one block at a time."""
    if "experts" not in job.offload:
        return 0.0
    return max((weight_bytes(job, policy, item) for item in held.shares if item.group.role == EXPERTS), default=0.0)
