"""From allocated to reserved to device memory, and how far each estimate may be off."""

from collections.abc import Sequence

from gatewright.planner.job import Job
from gatewright.planner.policy import Policy
from gatewright.spec.plan import Interval, Metric, Phase, PhaseName

SHARDED = ("fsdp1", "fsdp2", "zero3")


def intervals(job: Job, policy: Policy, phases: Sequence[Phase], resident: int) -> tuple[Interval, Interval, Interval]:
    """The peak as allocated, reserved and device bytes.

    The device adds the context and the buffers of each communicator. The number shown is meant to hold four runs of
    five: the margin makes it so.
    """
    allocated = max(phase.bytes for phase in phases)
    reserved = reserved_bytes(job, policy, phases, resident)
    device = reserved + policy.context_bytes + policy.communicator_bytes * communicators(job)
    moe = job.shape.is_moe
    return (
        interval("allocated", allocated, policy.margin_moe if moe else policy.margin, policy, moe=moe),
        interval("reserved", reserved, policy.reserved_margin_moe if moe else policy.reserved_margin, policy, moe=moe),
        interval("device", device, policy.reserved_margin_moe if moe else policy.reserved_margin, policy, moe=moe),
    )


def reserved_bytes(job: Job, policy: Policy, phases: Sequence[Phase], resident: int) -> float:
    """What the caching allocator holds at the peak.

    It reserves more than it hands out, since its blocks come in sizes that do not fit the next request: what stays
    is packed once, what comes and goes leaves gaps, and the few huge blocks of the logits hardly serve anything
    else. Measured as nvidia-smi less allocated on 140 runs of fms-acceleration.
    """
    sharded = job.layout.sharding in SHARDED and job.layout.shards > 1
    share = policy.sharded_reserve if sharded else policy.transient_reserve
    peaks = []
    for phase in phases:
        gaps = share * max(0, phase.bytes - resident)
        if phase.name == "loss" and job.loss in ("full", "fused"):
            gaps += logits_gap(job, policy)
        peaks.append(phase.bytes + gaps)
    extra: float = missing_grads(phases) if policy.reserves_grads else 0
    if sharded and job.method == "full":
        extra += unshared_step(phases, resident)
    return max(peaks) + policy.resident_reserve * resident + extra


def logits_gap(job: Job, policy: Policy) -> float:
    """Reserved a logit beyond what the loss allocates."""
    per_logit = max(0.0, policy.reserved_loss_bytes - policy.loss_bytes_per_logit(job))
    return per_logit * job.micro_batch_tokens * job.shape.vocab / job.layout.tp


def missing_grads(phases: Sequence[Phase]) -> int:
    """Gradients of the step phase that the peak phase does not hold."""
    peak = max(phases, key=lambda phase: phase.bytes)
    at_peak, at_step = (
        sum(part.bytes for part in phase.parts if part.name == "gradients") for phase in (peak, named(phases, "step"))
    )
    return max(0, at_step - at_peak)


def unshared_step(phases: Sequence[Phase], resident: int) -> int:
    """The update's temporaries are as large as flat shards; the activations' blocks do not serve them."""
    temporaries = sum(part.bytes for part in named(phases, "step").parts if part.name == "optimizer temporaries")
    return min(temporaries, max(0, named(phases, "backward").bytes - resident))


def named(phases: Sequence[Phase], name: PhaseName) -> Phase:
    return next(phase for phase in phases if phase.name == name)


def interval(metric: Metric, value: float, margin: float, policy: Policy, *, moe: bool) -> Interval:
    low, high = policy.interval_moe if moe else policy.interval
    shown = value * (1 + margin)
    return Interval(
        metric=metric,
        bytes=round(shown),
        low_bytes=round(shown * low),
        high_bytes=round(shown * (high + (policy.reserve_slack if metric != "allocated" else 0.0))),
    )


def communicators(job: Job) -> int:
    """Process groups with more than one rank on this rank: the world, and one a parallel dimension."""
    layout = job.layout
    if layout.ranks == 1 or layout.sharding == "pipeline_naive":
        return 0
    dimensions = (layout.tp, layout.pp, layout.cp, layout.ep)
    return 1 + sum(size > 1 for size in dimensions)
