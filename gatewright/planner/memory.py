"""Memory of the most loaded rank: the maximum over the phases of a training step, each phase with its parts."""

from dataclasses import dataclass

from gatewright.planner.job import Job
from gatewright.planner.memory_layer import LayerWork, layer_work, sequence_split
from gatewright.planner.memory_states import EXPERTS, Share, States, shares, stage_layers, states, weight_bytes
from gatewright.planner.policy import Policy
from gatewright.spec.plan import Part, Phase, PhaseName

FULLY_SHARDED = ("zero3", "fsdp1", "fsdp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage at work: everything the phases are made from, in bytes on one rank."""

    job: Job
    policy: Policy
    held: list[Share]
    states: States
    layers: range
    work: list[LayerWork]
    """One for each block of the stage."""
    in_flight: float
    """Micro-batches whose activations the stage holds at its fullest, in units of the whole stage."""
    last: bool


def phases_of(job: Job, policy: Policy) -> tuple[Phase, ...]:
    """The phases of the most loaded pipeline stage."""
    ends = {0, job.layout.pp - 1}
    candidates = [stage_phases(job, policy, stage) for stage in sorted(ends)]
    return max(candidates, key=lambda phases: max(phase.bytes for phase in phases))


def stage_phases(job: Job, policy: Policy, stage: int) -> tuple[Phase, ...]:
    held = shares(job, stage)
    layers = stage_layers(job, stage)
    work = layer_works(job, policy, layers)
    at = Stage(
        job=job,
        policy=policy,
        held=held,
        states=states(job, policy, held),
        layers=layers,
        work=work,
        in_flight=in_flight(job, stage),
        last=stage == job.layout.pp - 1,
    )
    return (
        phase("load", load_parts(at)),
        phase("loss", loss_parts(at)),
        phase("backward", max((backward_start_parts(at), backward_end_parts(at)), key=total)),
        phase("step", step_parts(at)),
    )


def layer_works(job: Job, policy: Policy, layers: range) -> list[LayerWork]:
    """Equal layers are worked out once."""
    known = {layer: layer_work(job, policy, layer) for layer in {job.shape.layers[index] for index in layers}}
    return [known[job.shape.layers[index]] for index in layers]


def in_flight(job: Job, stage: int) -> float:
    """Forward passes a stage runs before its first backward pass: 1F1B, interleaved when stages are virtual."""
    pp, chunks = job.layout.pp, job.layout.virtual_stages
    if pp == 1:
        return 1.0
    if chunks == 1:
        return float(pp - stage)
    return ((pp - stage - 1) * 2 + (chunks - 1) * pp + 1) / chunks


def phase(name: PhaseName, parts: list[Part]) -> Phase:
    return Phase(name=name, parts=tuple(part for part in parts if part.bytes > 0))


def part(name: str, value: float, formula: str = "") -> Part:
    return Part(name=name, bytes=round(value), formula=formula)


def total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)


def resident_parts(at: Stage) -> list[Part]:
    """Live between two steps."""
    states, types = at.states, at.policy.full if at.job.method == "full" else at.policy.adapter
    copies = 2.0 if at.job.reference_model else 1.0
    parts = [
        part("frozen weights", states.frozen_weights * copies),
        part("trained weights", states.trained_weights),
        part("reference model", states.trained_weights / max(types.weight, 1) * 2 if at.job.reference_model else 0.0),
        part("adapters", states.adapters),
        part("optimizer state", states.optimizer),
    ]
    if types.grad_persists:
        parts.append(part("gradient buffer", states.grads))
    parts.append(part("communication buckets", bucket_bytes(at)))
    return parts


def bucket_bytes(at: Stage) -> float:
    job, policy = at.job, at.policy
    if job.layout.dp * job.layout.cp == 1 or job.layout.sharding in ("fsdp1", "fsdp2", "pipeline_naive"):
        return 0.0
    trained = sum(share.parameters if share.trains else share.adapters for share in at.held)
    types = policy.full if job.method == "full" else policy.adapter
    return policy.buckets * min(policy.bucket_parameters, trained) * types.grad


def load_parts(at: Stage) -> list[Part]:
    states = at.states
    return [
        part("frozen weights", states.frozen_weights),
        part("trained weights", states.trained_weights),
        part("adapters", states.adapters),
    ]


def kept_bytes_per_token(at: Stage) -> float:
    """Activations that wait for the backward pass, of all blocks of the stage."""
    job, policy = at.job, at.policy
    shape = job.shape
    boundary = policy.residual_bytes(job) * shape.hidden * shape.residual_streams / sequence_split(job)
    if "activations" in job.offload:
        # Two blocks' worth is on the device, one leaving and one coming back.
        return 2 * boundary if job.checkpointing == "full" else 2 * max(work.kept for work in at.work)
    if job.checkpointing == "full":
        return boundary * len(at.work)
    if job.checkpointing == "alternate":
        return sum(boundary if index % 2 else work.kept for index, work in enumerate(at.work))
    if job.checkpointing == "per_op":
        return sum(boundary + work.kept_products for work in at.work)
    return sum(work.kept for work in at.work)


def kept_part(at: Stage) -> Part:
    tokens = at.job.micro_batch_tokens
    name = "kept activations" if at.job.checkpointing == "none" else "checkpoint boundaries"
    per_token = kept_bytes_per_token(at)
    value = per_token * tokens * at.in_flight
    return part(name, value, f"{per_token:,.0f} B a token × {tokens:,} tokens × {at.in_flight:.2f} in flight")


def loss_parts(at: Stage) -> list[Part]:
    job, policy = at.job, at.policy
    tokens, shape = job.micro_batch_tokens, job.shape
    parts = resident_parts(at)
    if job.accumulate and not grads_persist(at):
        parts.append(part("gradients", at.states.grads))
    parts.append(kept_part(at))
    if at.last:
        per_logit = policy.loss_bytes_per_logit(job)
        vocab = shape.vocab / job.layout.tp
        extra = 2 * vocab * policy.activation_bytes if shape.logit_softcap else 0.0
        head = final_norm_bytes(at)
        value = tokens * (per_logit * vocab + extra + head)
        parts.append(part("logits and loss", value, f"{tokens:,} × ({per_logit:g} B × {vocab:,.0f} + {head:,.0f} B)"))
        parts.append(part("loss chunks", linear_loss_bytes(at)))
    parts.append(part("gathered weights", gathered_bytes(at, layers=1)))
    return parts


def final_norm_bytes(at: Stage) -> float:
    """The last hidden state, its norm and its gradient, bytes a token."""
    h, b = at.job.shape.hidden / sequence_split(at.job), at.policy.activation_bytes
    return (4 if at.policy.norm == "eager" else 0) * h + 2 * b * h


def linear_loss_bytes(at: Stage) -> float:
    """A head fused with its loss: one chunk of logits, and the head's gradient if it trains."""
    job, policy = at.job, at.policy
    if job.loss not in ("linear", "chunked"):
        return 0.0
    value = policy.linear_loss_chunk_bytes
    if job.loss == "linear" and job.method == "full":
        value += job.shape.vocab * job.shape.hidden * policy.full.weight / job.layout.tp
    return value


def backward_start_parts(at: Stage) -> list[Part]:
    """The last block is recomputed and differentiated while every other block's activations wait."""
    job, tokens = at.job, at.job.micro_batch_tokens
    parts = resident_parts(at)
    if job.accumulate and not grads_persist(at):
        parts.append(part("gradients", at.states.grads))
    elif not grads_persist(at) and at.last:
        parts.append(part("gradients of the head", head_grad_bytes(at)))
    if not at.work:
        return parts
    worst = max(at.work, key=lambda work: work.backward)
    waiting = kept_part(at)
    if job.checkpointing in ("none", "per_op"):
        own = worst.kept if job.checkpointing == "none" else worst.kept_products
        waiting = part(waiting.name, max(0.0, waiting.bytes - own * tokens), waiting.formula)
    parts.append(waiting)
    parts.append(
        part("block at work", worst.backward * tokens, f"{worst.backward:,.0f} B a token × {tokens:,}, at {worst.at}")
    )
    if at.policy.frozen_fsdp_keeps_grads and job.layout.sharding == "fsdp1" and job.method != "full":
        h = job.shape.hidden * at.policy.residual_bytes(job)
        parts.append(part("block gradients held by FSDP", h * (len(at.work) - 1) * tokens))
    parts.append(part("gathered weights", gathered_bytes(at, layers=at.policy.gathered_layers)))
    parts.append(part("gradients in flight", flight_bytes(at)))
    parts.append(part("dequantised weights", dequantised_bytes(at)))
    return parts


def backward_end_parts(at: Stage) -> list[Part]:
    """The first block is differentiated: every gradient exists, no other activation does."""
    job, tokens = at.job, at.job.micro_batch_tokens
    if not at.work:
        return resident_parts(at)
    worst = max(at.work, key=lambda work: work.backward)
    parts = resident_parts(at)
    if not grads_persist(at):
        parts.append(part("gradients", at.states.grads))
    parts.append(part("block at work", worst.backward * tokens))
    if at.in_flight > 1:
        parts.append(part("waiting micro-batches", kept_bytes_per_token(at) * tokens * (at.in_flight - 1)))
    if at.policy.frozen_fsdp_keeps_grads and job.layout.sharding == "fsdp1" and job.method != "full":
        h = job.shape.hidden * at.policy.residual_bytes(job)
        parts.append(part("block gradients held by FSDP", h * (len(at.work) - 1) * tokens))
    parts.append(part("gathered weights", gathered_bytes(at, layers=at.policy.gathered_layers)))
    parts.append(part("gradients in flight", flight_bytes(at)))
    parts.append(part("dequantised weights", dequantised_bytes(at)))
    return parts


def step_parts(at: Stage) -> list[Part]:
    parts = resident_parts(at)
    if not grads_persist(at):
        parts.append(part("gradients", at.states.grads))
    parts.append(part("optimizer temporaries", at.states.step))
    return parts


def grads_persist(at: Stage) -> bool:
    types = at.policy.full if at.job.method == "full" else at.policy.adapter
    return types.grad_persists


def head_grad_bytes(at: Stage) -> float:
    grad = at.policy.full.grad
    roles = ("embedding",) if at.job.shape.tied else ("head",)
    return sum(share.parameters * grad / share.shards for share in at.held if share.trains and share.group.role in roles)


def block_bytes(at: Stage) -> float:
    """Full weights of the largest block as they are gathered, in the compute type (small formats stay small)."""
    sizes: dict[int, float] = {}
    for item in at.held:
        if item.group.layer is None or item.shards == 1:
            continue
        stored = item.parameters * 2 if item.trains else weight_bytes(at.job, at.policy, item)
        sizes[item.group.layer] = sizes.get(item.group.layer, 0.0) + stored + item.adapters * 2
    return max(sizes.values(), default=0.0)


def gathered_bytes(at: Stage, *, layers: float) -> float:
    """Weights that FSDP or ZeRO-3 has gathered: some blocks, and the root unit with embedding and head."""
    if at.job.layout.sharding not in FULLY_SHARDED:
        return 0.0
    value = block_bytes(at) * min(layers, len(at.work))
    if at.policy.gathers_root:
        value += sum(item.parameters * 2 for item in at.held if item.group.layer is None and item.shards > 1)
    return value


def flight_bytes(at: Stage) -> float:
    """Unsharded gradients of the block at work, on their way to the ranks that own them."""
    if at.job.layout.sharding not in FULLY_SHARDED:
        return 0.0
    sizes: dict[int, float] = {}
    for item in at.held:
        if item.group.layer is not None and item.shards > 1:
            count = item.parameters if item.trains else item.adapters
            sizes[item.group.layer] = sizes.get(item.group.layer, 0.0) + count
    return max(sizes.values(), default=0.0) * (2 + at.policy.reduce_bytes)


def dequantised_bytes(at: Stage) -> float:
    """The largest matrix of a block in the compute type, where weights are stored in few bits."""
    job = at.job
    if job.storage in ("bf16", "fp32") or job.method == "full":
        return 0.0
    largest = 0.0
    for item in at.held:
        if item.group.layer is None:
            continue
        divisor = item.group.parameters / max(item.parameters, 1)
        for linear in item.group.linears:
            if item.group.role == EXPERTS and not job.quantized_experts:
                continue
            one = linear.copies if item.group.role == EXPERTS and at.policy.experts == "loop" else 1
            largest = max(largest, linear.weights / divisor / one)
    return 2 * largest
