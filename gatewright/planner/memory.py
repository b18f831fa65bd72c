"""Memory of the most loaded rank: the maximum over the phases of a training step, each phase with its parts."""

from dataclasses import dataclass, replace

from gatewright.planner.job import Job
from gatewright.planner.memory_gather import (
    bucket_bytes,
    dequantised_bytes,
    flight_bytes,
    gathered_at_loss,
    gathered_block,
    gathered_bytes,
    reduction_bytes,
    unsharded_grads,
    visiting_experts,
)
from gatewright.planner.memory_layer import LayerWork, layer_work, norm_op, sequence_split
from gatewright.planner.memory_reserve import intervals
from gatewright.planner.memory_states import (
    Held,
    States,
    adapter_parameters,
    grad_shards,
    shares,
    stage_layers,
    states,
)
from gatewright.planner.policy import Policy, Types, find_policy
from gatewright.spec.hardware import GIB
from gatewright.spec.plan import Interval, MemoryEstimate, Metric, Part, Phase, PhaseName


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage at work: everything the phases are made from, in bytes on one rank."""

    job: Job
    policy: Policy
    types: Types
    """Of the parameters that train."""
    held: Held
    states: States
    work: list[LayerWork]
    """One for each block of the stage."""
    in_flight: float
    """Micro-batches whose activations the stage holds at its fullest, in units of the whole stage."""
    last: bool

    @property
    def worst(self) -> LayerWork | None:
        return max(self.work, key=lambda work: work.backward, default=None)

    @property
    def grads_wait(self) -> bool:
        """Gradients of earlier micro-batches are there while the forward pass runs."""
        return self.job.accumulate and not self.types.grad_persists and not self.job.step_in_backward


def estimate_memory(job: Job, *, stage: int | None = None) -> MemoryEstimate:
    """Peak of the most loaded rank, or of the ranks of one pipeline stage.

    Closed form, in milliseconds. Raises UserError for an unknown framework.
    """
    policy = find_policy(job.framework)
    ends = sorted({0, job.layout.pp - 1}) if stage is None else [stage]
    judged = [phases_of(read_stage(job, policy, end)) for end in ends]
    phases, resident = max(judged, key=lambda item: max(phase.bytes for phase in item[0]))
    allocated, reserved, device = intervals(job, policy, phases, resident)
    estimate = MemoryEstimate(
        phases=phases,
        resident_bytes=resident,
        allocated=allocated,
        reserved=reserved,
        device=device,
        framework=policy.key,
    )
    return estimate if job.token_range is None else over_lengths(estimate, job, stage=stage)


def over_lengths(estimate: MemoryEstimate, job: Job, *, stage: int | None) -> MemoryEstimate:
    """The estimate with its intervals stretched to the shortest and the longest rows that may come."""
    assert job.token_range is not None
    short, long = (
        estimate_memory(replace(job, tokens_per_row=tokens, token_range=None), stage=stage)
        for tokens in job.token_range
    )

    def stretched(metric: Metric) -> Interval:
        return replace(
            estimate.by_metric(metric),
            low_bytes=short.by_metric(metric).low_bytes,
            high_bytes=long.by_metric(metric).high_bytes,
        )

    return replace(
        estimate, allocated=stretched("allocated"), reserved=stretched("reserved"), device=stretched("device")
    )


def read_stage(job: Job, policy: Policy, stage: int) -> Stage:
    held = shares(job, policy, stage)
    return Stage(
        job=job,
        policy=policy,
        types=policy.trained(job),
        held=held,
        states=states(job, policy, held),
        work=layer_works(job, policy, stage_layers(job, stage)),
        in_flight=in_flight(job, stage),
        last=stage == job.layout.pp - 1,
    )


def layer_works(job: Job, policy: Policy, layers: range) -> list[LayerWork]:
    """Equal layers are worked out once."""
    known = {layer: layer_work(job, policy, layer) for layer in {job.shape.layers[index] for index in layers}}
    return [known[job.shape.layers[index]] for index in layers]


def in_flight(job: Job, stage: int) -> float:
    """Forward passes a stage runs before its first backward pass: 1F1B, interleaved when stages are virtual."""
    pp, chunks = job.layout.pp, job.layout.virtual_stages
    if pp == 1 or job.layout.sharding == "pipeline_naive":
        return 1.0
    if chunks == 1:
        return float(pp - stage)
    return ((pp - stage - 1) * 2 + (chunks - 1) * pp + 1) / chunks


def phases_of(at: Stage) -> tuple[tuple[Phase, ...], int]:
    """The phases, and what stays between two steps."""
    phases = (
        phase("load", load_parts(at)),
        phase("loss", loss_parts(at)),
        phase("backward", max((final_norm_parts(at), backward_start_parts(at), backward_end_parts(at)), key=total)),
        phase("step", step_parts(at)),
        phase("save", save_parts(at)),
    )
    return phases, total(resident_parts(at))


def phase(name: PhaseName, parts: list[Part]) -> Phase:
    return Phase(name=name, parts=tuple(part for part in parts if part.bytes > 0))


def part(name: str, value: float, formula: str = "") -> Part:
    return Part(name=name, bytes=round(value), formula=formula)


def total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)


def weight_parts(at: Stage) -> list[Part]:
    states = at.states
    reference = states.plain_weights if at.job.reference_model else 0.0
    return [
        part("frozen weights", states.frozen_weights, states.frozen_formula),
        part("trained weights", states.trained_weights, states.trained_formula),
        part("reference model", reference),
        part("adapters", states.adapters, f"{states.adapter_count:,.0f} × {at.types.weight:g} B"),
    ]


def resident_parts(at: Stage) -> list[Part]:
    """Live between two steps."""
    parts = weight_parts(at)
    parts.append(part("optimizer state", at.states.optimizer, at.states.optimizer_formula))
    if at.types.grad_persists:
        parts.append(part("gradient buffer", at.states.grads, at.states.grads_formula))
    parts.append(part("communication buckets", bucket_bytes(at.job, at.policy, at.held)))
    return parts


def load_parts(at: Stage) -> list[Part]:
    parts = weight_parts(at)
    if at.policy.loads_whole_model and at.job.layout.shards > 1:
        parts.append(part("whole checkpoint", at.states.whole_weights))
    return parts


def boundary_bytes(at: Stage) -> float:
    """Of a block's input, a token."""
    job, shape = at.job, at.job.shape
    return at.policy.residual_bytes(job) * shape.hidden * shape.residual_streams / sequence_split(job)


def recomputed(at: Stage, block: int) -> bool:
    """Whether the block's forward pass runs again before its backward pass."""
    if at.job.checkpointing == "alternate":
        return block % 2 == at.policy.alternate_from
    return at.job.checkpointing == "full"


def waiting_by_block(at: Stage) -> list[tuple[float, float]]:
    """Activations that wait for the backward pass, bytes a token: (of the block, those its own backward counts)."""
    boundary, per_op = boundary_bytes(at), at.job.checkpointing == "per_op"
    return [
        (boundary, 0.0)
        if recomputed(at, index)
        else (boundary + work.kept_products, work.kept_products)
        if per_op
        else (work.kept, work.kept)
        for index, work in enumerate(at.work)
    ]


def kept_bytes_per_token(at: Stage) -> float:
    """Activations that wait for the backward pass, of all blocks of the stage."""
    if "activations" in at.job.offload:
        # Two blocks' worth is on the device, one leaving and one coming back.
        return 2 * (boundary_bytes(at) if at.job.checkpointing == "full" else max(work.kept for work in at.work))
    return sum(kept for kept, _ in waiting_by_block(at))


def kept_part(at: Stage) -> Part:
    tokens = at.job.micro_batch_tokens
    name = "checkpoint boundaries" if at.job.checkpointing == "full" else "kept activations"
    per_token = kept_bytes_per_token(at)
    times = f" × {at.in_flight:.2f} in flight" if at.in_flight != 1 else ""
    return part(name, per_token * tokens * at.in_flight, f"{per_token:,.0f} B a token × {tokens:,} tokens{times}")


def loss_parts(at: Stage) -> list[Part]:
    """The end of the forward pass: every block's activations, and the logits."""
    parts = resident_parts(at)
    parts += waiting_grads(at)
    parts.append(kept_part(at))
    if at.last:
        parts += logits_parts(at)
    parts.append(part("gathered weights", gathered_at_loss(at.job, at.policy, at.held)))
    return parts


def waiting_grads(at: Stage) -> list[Part]:
    if not at.grads_wait:
        return []
    unsharded = unsharded_grads(at.job, at.policy, at.held) if at.policy.accumulates_unsharded else 0.0
    return [part("gradients", max(at.states.grads, unsharded), at.states.grads_formula)]


def logits_parts(at: Stage) -> list[Part]:
    job, policy, shape = at.job, at.policy, at.job.shape
    tokens, vocab = job.micro_batch_tokens, shape.vocab / job.layout.tp
    per_logit = policy.loss_bytes_per_logit(job)
    if shape.logit_softcap and job.loss != "linear":
        per_logit += 2 * policy.activation_bytes
    if job.distillation:
        per_logit *= 2
    h, b = shape.hidden / sequence_split(job), policy.activation_bytes
    head = (4 if policy.norm_style(job) == "eager" else 0) * h + 2 * b * h
    parts = [
        part("logits and loss", tokens * per_logit * vocab, f"{tokens:,} tokens × {vocab:,.0f} × {per_logit:g} B"),
        part("last hidden state", tokens * head, f"{tokens:,} tokens × {head:,.0f} B"),
    ]
    if job.loss == "linear":
        chunk = min(tokens, job.loss_chunk_tokens or policy.linear_chunk_tokens)
        value = chunk * vocab * policy.linear_chunk_bytes
        parts.append(
            part("logits of a chunk", value, f"{chunk:,} tokens × {vocab:,.0f} × {policy.linear_chunk_bytes:g} B")
        )
        if job.trains("embedding" if shape.tied else "head"):
            grad = policy.linear_head_grad_bytes * vocab * shape.hidden
            parts.append(part("gradient of the head", grad))
    return parts


def block_parts(at: Stage, work: LayerWork) -> list[Part]:
    """One block recomputed and differentiated, and the weights and gradients that are gathered for it."""
    job, policy, tokens = at.job, at.policy, at.job.micro_batch_tokens
    parts = [
        part("block at work", work.backward * tokens, f"{work.backward:,.0f} B a token × {tokens:,}, at {work.at}"),
        part("gathered weights", gathered_bytes(job, policy, at.held, blocks=policy.gathered_layers)),
        part("gradients in flight", flight_bytes(job, policy, at.held) + reduction_bytes(job, policy, at.held)),
        part("dequantised weights", dequantised_bytes(job, policy, at.held)),
        part("experts of the block", visiting_experts(job, policy, at.held)),
    ]
    if policy.frozen_fsdp_keeps_grads and job.layout.sharding == "fsdp1" and job.method != "full":
        h = job.shape.hidden * policy.residual_bytes(job)
        parts.append(part("block gradients held by FSDP", h * (len(at.work) - 1) * tokens))
    return parts


def final_norm_parts(at: Stage) -> list[Part]:
    """The norm before the head is differentiated while every block's activations wait."""
    job = at.job
    parts = resident_parts(at)
    if not at.last:
        return parts
    norm = norm_op(job, at.policy, "final norm", job.shape.hidden / sequence_split(job))
    parts += waiting_grads(at)
    if not at.grads_wait and not at.types.grad_persists:
        parts.append(part("gradient of the head", head_grad_bytes(at)))
    return [*parts, kept_part(at), part("final norm", (norm.keeps + norm.grads) * job.micro_batch_tokens)]


def backward_start_parts(at: Stage) -> list[Part]:
    """A block is differentiated (and recomputed) while the activations of those before it wait: the last, as a rule."""
    parts = resident_parts(at)
    parts += waiting_grads(at)
    if not at.grads_wait and not at.types.grad_persists and at.last:
        parts.append(part("gradient of the head", head_grad_bytes(at)))
    if at.worst is None:
        return parts
    waiting, work = fullest_block(at)
    kept = kept_part(at)
    return [*parts, part(kept.name, waiting * at.job.micro_batch_tokens, kept.formula), *block_parts(at, work)]


def fullest_block(at: Stage) -> tuple[float, LayerWork]:
    """The block in whose backward pass the stage is fullest, and the bytes a token that wait meanwhile."""
    assert at.worst is not None
    every = kept_bytes_per_token(at) * at.in_flight
    by_block = waiting_by_block(at)
    if "activations" in at.job.offload:
        return max(0.0, every - max(own for _, own in by_block)), at.worst
    waiting, found = every, []
    for (kept, own), work in zip(reversed(by_block), reversed(at.work), strict=True):
        found.append((waiting - own, work))
        waiting -= kept
    return max(found, key=lambda item: item[0] + item[1].backward)


def backward_end_parts(at: Stage) -> list[Part]:
    """The first block is differentiated: all gradients but its own exist, no other block's activations do."""
    parts = resident_parts(at)
    if not at.types.grad_persists and not at.job.step_in_backward:
        missing = last_grads(at)
        formula = f"{at.states.grads_formula}, less {missing / GIB:.2f} GiB that are made last"
        parts.append(part("gradients", at.states.grads - missing, formula))
    if at.worst is None:
        return parts
    if at.in_flight > 1:
        waiting = kept_bytes_per_token(at) * at.job.micro_batch_tokens * (at.in_flight - 1)
        parts.append(part("waiting micro-batches", waiting))
    return [*parts, *block_parts(at, at.worst)]


def last_grads(at: Stage) -> float:
    """Gradients that the backward pass makes last: of the first block, and of an embedding that is not the head."""
    if at.job.accumulate:
        return 0.0
    last = [at.held.shares[index] for index in at.held.first_block]
    if not at.job.shape.tied:
        last += [share for share in at.held.shares if share.group.role == "embedding"]
    return sum(
        (share.parameters if share.trains else share.adapters) * at.types.grad / grad_shards(at.job, share)
        for share in last
    )


def head_grad_bytes(at: Stage) -> float:
    role = "embedding" if at.job.shape.tied else "head"
    trained = (share for share in at.held.shares if share.trains and share.group.role == role)
    return sum(share.parameters * at.types.grad / share.shards for share in trained)


def step_parts(at: Stage) -> list[Part]:
    """Gradients, optimizer state and the temporaries of the update."""
    parts = resident_parts(at)
    if not at.types.grad_persists and not at.job.step_in_backward:
        parts.append(part("gradients", at.states.grads, at.states.grads_formula))
    temporary = 0.0 if at.job.step_in_backward else at.states.step
    grouped = at.job.layout.sharding in ("zero1", "zero2", "zero3") and at.types.master > 0
    group = min(at.policy.step_group_bytes, 4 * at.states.updated_count) if grouped else 0.0
    parts.append(part("optimizer temporaries", max(temporary, group)))
    return parts


def save_parts(at: Stage) -> list[Part]:
    """Tensors go to the host one block at a time; adapters go whole, unless they go by the tensor."""
    parts = resident_parts(at)
    if at.job.method == "full":
        parts.append(part("gathered weights", gathered_block(at.job, at.policy, at.held)))
    elif at.job.layout.shards > 1 and not at.policy.saves_by_tensor:
        parts.append(part("gathered adapters", at.states.adapter_count * at.types.weight))
    elif at.job.layout.shards > 1:
        largest = max((adapter_parameters(at.job, share.group) for share in at.held.shares), default=0.0)
        parts.append(part("gathered adapter of a block", largest * at.types.weight))
    return parts
