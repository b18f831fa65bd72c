"""Weights, gradients and optimizer state of one rank: what each parallel dimension divides, and what it replicates."""

from collections import Counter
from dataclasses import dataclass, replace

from gatewright.planner.job import BYTES_PER_WEIGHT, Job
from gatewright.planner.policy import Policy, Types
from gatewright.spec.eight_bit import BYTES_8BIT
from gatewright.spec.shape import ModelShape, TensorGroup

EXPERTS = "routed_experts"
REPLICATED_UNDER_TP = ("norms", "router", "residual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a tensor group that a rank works with, before ZeRO or FSDP divides it; equal groups are one share."""

    group: TensorGroup
    """One of the equal ones."""
    count: int
    """How many of them the rank's pipeline stage has."""
    parameters: float
    """Of one."""
    matrices: float
    """Of them in linear modules: what a 4-bit format stores small."""
    adapters: float
    shards: int
    """Ranks that ZeRO or FSDP divides it over."""
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the ranks of one pipeline stage hold."""

    shares: tuple[Share, ...]
    blocks: frozenset[tuple[int, ...]]
    """Each kind of block, as indices into `shares`."""
    first_block: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """A shape's tensor groups with equal ones merged: large models are a few kinds of block, many times."""

    shape: ModelShape
    groups: tuple[TensorGroup, ...]
    blocks: tuple[tuple[int, ...], ...]
    """By layer: indices into `groups`."""
    outside: tuple[int, ...]
    """Indices of what belongs to no block."""


_KINDS: dict[int, Kinds] = {}


def kinds_of(shape: ModelShape) -> Kinds:
    """Merged once a shape: hashing a large model's groups takes longer than an estimate."""
    known = _KINDS.get(id(shape))
    if known is None or known.shape is not shape:
        known = merge(shape)
        if len(_KINDS) > 64:
            _KINDS.clear()
        _KINDS[id(shape)] = known
    return known


def merge(shape: ModelShape) -> Kinds:
    groups: list[TensorGroup] = []
    index: dict[tuple[object, ...], int] = {}
    blocks: list[list[int]] = [[] for _ in shape.layers]
    outside: list[int] = []
    for group in shape.groups:
        if group.role == "mtp":
            continue
        key = (group.role, group.parameters, group.experts, group.linears, group.layer is None)
        if key not in index:
            index[key] = len(groups)
            groups.append(group)
        (outside if group.layer is None else blocks[group.layer]).append(index[key])
    return Kinds(shape=shape, groups=tuple(groups), blocks=tuple(map(tuple, blocks)), outside=tuple(outside))


def stage_layers(job: Job, stage: int) -> range:
    """Blocks of one pipeline stage: equal runs, the remainder on the first stages."""
    layers, stages = len(job.shape.layers), job.layout.pp
    small, more = divmod(layers, stages)
    start = stage * small + min(stage, more)
    return range(start, start + small + (stage < more))


def shares(job: Job, policy: Policy, stage: int) -> Held:
    """What the ranks of one pipeline stage hold, kind by kind; MTP layers are left out."""
    kinds = kinds_of(job.shape)
    blocks = [kinds.blocks[layer] for layer in stage_layers(job, stage)]
    counts: Counter[int] = Counter(index for block in blocks for index in block)
    counts.update(index for index in kinds.outside if on_stage(job, kinds.groups[index], stage))
    place = {index: position for position, index in enumerate(sorted(counts))}
    held = [share(job, policy, kinds.groups[index], count=counts[index]) for index in sorted(counts)]
    if policy.unties_head and job.shape.tied and stage == job.layout.pp - 1:
        embedding = next(group for group in job.shape.groups if group.role == "embedding")
        held.append(share(job, policy, replace(embedding, role="head"), count=1))
    local = [tuple(place[index] for index in block) for block in blocks]
    return Held(shares=tuple(held), blocks=frozenset(local), first_block=local[0] if local else ())


def on_stage(job: Job, group: TensorGroup, stage: int) -> bool:
    """Embedding and towers on the first stage, the rest of what is no block on the last; a tied head on both."""
    first, last = stage == 0, stage == job.layout.pp - 1
    if group.role == "embedding":
        return first or (last and job.shape.tied)
    return first if group.role == "vision" else last


def share(job: Job, policy: Policy, group: TensorGroup, *, count: int) -> Share:
    layout = job.layout
    if group.role == EXPERTS:
        divisor = layout.ep * layout.etp
        shards = 1 if policy.fsdp_skips_experts and layout.ep > 1 else layout.expert_shards
    else:
        divisor, shards = (1 if group.role in REPLICATED_UNDER_TP else layout.tp), layout.shards
    # TP divides one of an adapter's two matrices, EP divides both: of the busiest rank, where some experts have one.
    adapter_divisor = divisor if group.role == EXPERTS else 1 + (divisor - 1) / 2
    if group.role == EXPERTS and job.adapter is not None:
        adapter_divisor /= job.adapter.busiest(ep=layout.ep, experts=group.experts)
    return Share(
        group=group,
        count=count,
        parameters=group.parameters / divisor,
        matrices=sum(part.weights for part in group.linears if part.name not in policy.plain_linears) / divisor,
        adapters=adapter_parameters(job, group) / adapter_divisor,
        shards=shards,
        trains=job.trains(group.role),
    )


def adapter_parameters(job: Job, group: TensorGroup) -> float:
    if job.adapter is None:
        return 0.0
    return job.adapter.parameters(group, hidden=job.shape.hidden, vocab=job.shape.vocab)


def trainable(job: Job) -> int:
    """Parameters that train: weights themselves, and adapters."""
    groups = [group for group in job.shape.groups if group.role != "mtp"]
    whole = sum(group.parameters for group in groups if job.trains(group.role))
    return whole + round(sum(adapter_parameters(job, group) for group in groups))


def weight_bytes(job: Job, policy: Policy, part: Share) -> float:
    """Stored weights of one group of a share, before ZeRO or FSDP divides them."""
    if part.trains:
        return part.parameters * policy.trained(job).weight
    if part.group.role in job.stored:
        return part.parameters * job.stored[part.group.role]
    storage = job.storage_of(part.group.role)
    if storage == "nf4" and policy.double_quant:
        storage = "nf4_double"
    small = part.matrices if quantizes(job, part.group) else 0.0
    plain = BYTES_PER_WEIGHT["fp32" if storage == "fp32" else "bf16"]
    return small * BYTES_PER_WEIGHT[storage] + (part.parameters - small) * plain


def quantizes(job: Job, group: TensorGroup) -> bool:
    """Whether the matrices of a group are stored in few bits: blocks only, never embedding, head, router or norms."""
    if group.layer is None or group.role in ("router", "norms", "residual"):
        return False
    return job.storage_of(group.role) not in ("bf16", "fp32")


def weight_shards(job: Job, part: Share) -> int:
    return part.shards if job.layout.sharding in ("zero3", "fsdp1", "fsdp2") else 1


def grad_shards(job: Job, part: Share) -> int:
    return part.shards if job.layout.sharding in ("zero2", "zero3", "fsdp1", "fsdp2") else 1


def optimizer_bytes(job: Job, types: Types) -> float:
    """Master weight and moments, bytes a parameter."""
    moments = {
        "adamw": 2 * types.moment,
        "adamw_8bit": BYTES_8BIT,
        "adamw_4bit": 2 * (0.5 + 4 / 128),  # torchao: blocks of 128
        "muon": types.moment,
        "sgd": 0.0,
    }[job.optimizer]
    return types.master + moments


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes on one rank, offloaded states left out; counts are parameters."""

    frozen_weights: float = 0.0
    trained_weights: float = 0.0
    adapters: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    step: float = 0.0
    """Temporaries of the optimizer step."""
    plain_weights: float = 0.0
    """The trained weights once more, frozen and in bf16: a reference model."""
    whole_weights: float = 0.0
    """All weights of the stage before they are sharded."""
    adapter_count: float = 0.0
    updated_count: float = 0.0
    """Trained parameters that this rank updates."""
    frozen_formula: str = ""
    trained_formula: str = ""
    grads_formula: str = ""
    optimizer_formula: str = ""


def states(job: Job, policy: Policy, held: Held) -> States:
    """Sums over the tensor groups."""
    frozen = trained = adapters = grads = optimizer = step = whole = plain = adapter_count = updated = 0.0
    trained_count = frozen_count = 0.0
    zero = job.layout.sharding not in ("none", "pipeline_naive")
    types = policy.trained(job)
    for part in held.shares:
        weights = weight_bytes(job, policy, part) * part.count
        stored = weights / weight_shards(job, part)
        count = (part.parameters if part.trains else part.adapters) * part.count
        own = count / (part.shards if zero else 1)
        whole += weights
        if part.trains:
            trained += stored
            plain += count * 2 / weight_shards(job, part)
            trained_count += count
        else:
            frozen += 0.0 if "experts" in job.offload and part.group.role == EXPERTS else stored
            frozen_count += part.parameters * part.count
            adapters += count * types.weight / weight_shards(job, part)
            adapter_count += count
        updated += own
        grads += count * types.grad / grad_shards(job, part)
        optimizer += own * optimizer_bytes(job, types)
        step += own * types.step if job.optimizer == "adamw" else 0.0
    on_host = "weights" in job.offload
    no_state = "optimizer" in job.offload
    return States(
        frozen_weights=0.0 if on_host else frozen,
        trained_weights=0.0 if on_host else trained,
        adapters=adapters,
        grads=0.0 if on_host and no_state else grads,
        optimizer=0.0 if no_state else optimizer,
        step=0.0 if no_state else step,
        plain_weights=plain,
        whole_weights=whole,
        adapter_count=adapter_count,
        updated_count=updated,
        frozen_formula=f"{frozen_count:,.0f} parameters held in {job.storage}{' as stored' if job.stored else ''}",
        trained_formula=f"{trained_count:,.0f} × {types.weight:g} B / {shards_text(job)}",
        grads_formula=f"{trained_count + adapter_count:,.0f} × {types.grad:g} B / {grads_text(job)}",
        optimizer_formula=f"{updated:,.0f} × {optimizer_bytes(job, types):g} B",
    )


def grads_text(job: Job) -> str:
    return str(job.layout.shards if job.layout.sharding in ("zero2", "zero3", "fsdp1", "fsdp2") else 1)


def shards_text(job: Job) -> str:
    return str(job.layout.shards if job.layout.sharding in ("zero3", "fsdp1", "fsdp2") else 1)
