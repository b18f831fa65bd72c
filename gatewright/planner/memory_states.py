"""Weights, gradients and optimizer state of one rank: what each parallel dimension divides, and what it replicates."""

from dataclasses import dataclass

from gatewright.planner.job import BYTES_PER_WEIGHT, Job
from gatewright.planner.policy import Policy, Types
from gatewright.spec.shape import TensorGroup

EXPERTS = "routed_experts"
REPLICATED_UNDER_TP = ("norms", "router", "residual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of one tensor group that a rank works with, before ZeRO or FSDP divides it."""

    group: TensorGroup
    parameters: float
    matrices: float
    """Of them in linear modules: what a 4-bit format stores small."""
    adapters: float
    shards: int
    """Ranks that ZeRO or FSDP divides it over."""
    trains: bool


def stage_layers(job: Job, stage: int) -> range:
    """Blocks of one pipeline stage: equal runs, the remainder on the first stages."""
    layers, stages = len(job.shape.layers), job.layout.pp
    small, more = divmod(layers, stages)
    start = stage * small + min(stage, more)
    return range(start, start + small + (stage < more))


def shares(job: Job, stage: int) -> list[Share]:
    """What the ranks of one pipeline stage hold, tensor group by tensor group; MTP layers are left out."""
    layers = stage_layers(job, stage)
    first, last = stage == 0, stage == job.layout.pp - 1
    held: list[Share] = []
    for group in job.shape.groups:
        if group.role in ("mtp", "vision"):
            continue
        outside = group.layer is None
        if not outside and group.layer not in layers:
            continue
        if outside and not (first if group.role == "embedding" else last):
            tied_head = group.role == "embedding" and job.shape.tied and last
            if not tied_head:
                continue
        held.append(share(job, group))
    return held


def share(job: Job, group: TensorGroup) -> Share:
    layout = job.layout
    if group.role == EXPERTS:
        divisor, shards = layout.ep * layout.etp, layout.expert_shards
    else:
        divisor, shards = (1 if group.role in REPLICATED_UNDER_TP else layout.tp), layout.shards
    adapters = adapter_parameters(job, group)
    # A sharded adapter matrix: TP divides one of A and B, EP divides both.
    adapter_divisor = divisor if group.role == EXPERTS else 1 + (divisor - 1) / 2
    return Share(
        group=group,
        parameters=group.parameters / divisor,
        matrices=group.linear_weights / divisor,
        adapters=adapters / adapter_divisor,
        shards=shards,
        trains=job.method == "full" and group.role not in job.frozen,
    )


def adapter_parameters(job: Job, group: TensorGroup) -> int:
    adapter = job.adapter
    if adapter is None or group.role not in adapter.roles:
        return 0
    return sum(
        linear.lora_parameters(adapter.rank)
        for linear in group.linears
        if linear.module and (adapter.names is None or linear.name in adapter.names)
    )


def weight_bytes(job: Job, policy: Policy, part: Share) -> float:
    """Stored weights of one share, before ZeRO or FSDP divides them."""
    if part.trains:
        return part.parameters * policy.full.weight
    quantized = part.matrices if quantizes(job, part.group) else 0.0
    plain = BYTES_PER_WEIGHT["fp32" if job.storage == "fp32" else "bf16"]
    storage = "nf4_double" if job.storage == "nf4" and policy.double_quant else job.storage
    return quantized * BYTES_PER_WEIGHT[storage] + (part.parameters - quantized) * plain


def quantizes(job: Job, group: TensorGroup) -> bool:
    """Whether the matrices of a group are stored in the job's small format: blocks only, never embedding or head."""
    if job.storage in ("bf16", "fp32") or group.layer is None or group.role in ("router", "norms", "residual"):
        return False
    return job.quantized_experts or group.role != EXPERTS


def weight_shards(job: Job, part: Share) -> int:
    return part.shards if job.layout.sharding in ("zero3", "fsdp1", "fsdp2") else 1


def grad_shards(job: Job, part: Share) -> int:
    return part.shards if job.layout.sharding in ("zero2", "zero3", "fsdp1", "fsdp2") else 1


def optimizer_bytes(job: Job, types: Types) -> float:
    """Master weight and moments, bytes a parameter."""
    moments = {
        "adamw": 2 * types.moment,
        "adamw_8bit": 2 * (1 + 4 / 2048),  # bitsandbytes: one fp32 scale a block of 2048
        "adamw_4bit": 2 * (0.5 + 4 / 128),  # torchao: blocks of 128
        "muon": types.moment,
        "sgd": 0.0,
    }[job.optimizer]
    return types.master + moments


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes on one rank."""

    frozen_weights: float
    trained_weights: float
    adapters: float
    grads: float
    optimizer: float
    step: float
    """Temporaries of the optimizer step."""
    adapter_count: float
    trained_count: float
    """Trained parameters that this rank updates."""


def states(job: Job, policy: Policy, held: list[Share]) -> States:
    """Sums over the tensor groups; offloaded states count nothing."""
    frozen = trained = adapters = grads = optimizer = step = adapter_count = trained_count = 0.0
    zero = job.layout.sharding != "none"
    for part in held:
        weights = weight_bytes(job, policy, part) / weight_shards(job, part)
        types, count = (policy.full, part.parameters) if part.trains else (policy.adapter, part.adapters)
        adapter_count += part.adapters
        if part.trains:
            trained += weights
        else:
            frozen += weights
            adapters += count * types.weight / weight_shards(job, part)
        if not (part.trains or part.adapters):
            continue
        updated = count / (part.shards if zero else 1)
        trained_count += updated
        grads += count * types.grad / grad_shards(job, part)
        optimizer += updated * optimizer_bytes(job, types)
        step += updated * types.step
    if "weights" in job.offload:
        frozen = trained = 0.0
    if "experts" in job.offload:
        frozen -= sum(
            weight_bytes(job, policy, part) / weight_shards(job, part) for part in held if part.group.role == EXPERTS
        )
    if "optimizer" in job.offload:
        optimizer = step = 0.0
    return States(
        frozen_weights=max(0.0, frozen),
        trained_weights=trained,
        adapters=adapters,
        grads=grads,
        optimizer=optimizer,
        step=step,
        adapter_count=adapter_count,
        trained_count=trained_count,
    )
