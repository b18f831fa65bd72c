"""From allocated to reserved to device memory, and how far each estimate may be off."""

from collections.abc import Sequence

from gatewright.planner.job import Job
from gatewright.planner.policy import Policy
from gatewright.spec.plan import Interval, Metric, Phase


def intervals(
    job: Job, policy: Policy, phases: Sequence[Phase], resident: int
) -> tuple[Interval, Interval, Interval]:
    """The peak as allocated, reserved and device bytes.

    The caching allocator reserves more than it hands out: its blocks come in sizes that do not fit the next request.
    What stays is packed once; what comes and goes each step leaves gaps. The device adds the context and the
    buffers of each communicator.
    """
    allocated = max(phase.bytes for phase in phases)
    transient = max(0, allocated - resident)
    reserved = allocated + policy.transient_reserve * transient + policy.resident_reserve * resident
    if policy.reserves_grads:
        reserved += missing_grads(phases)
    device = reserved + policy.context_bytes + policy.communicator_bytes * communicators(job)
    low, high = policy.interval_moe if job.shape.is_moe else policy.interval
    slack = policy.reserve_slack
    return (
        interval("allocated", allocated, low, high),
        interval("reserved", reserved, low, high + slack),
        interval("device", device, low, high + slack),
    )


def missing_grads(phases: Sequence[Phase]) -> int:
    """Gradients of the step phase that the peak phase does not hold."""
    peak = max(phases, key=lambda phase: phase.bytes)
    at_peak, at_step = (
        sum(part.bytes for part in phase.parts if part.name == "gradients") for phase in (peak, phases[-1])
    )
    return max(0, at_step - at_peak)


def interval(metric: Metric, value: float, low: float, high: float) -> Interval:
    return Interval(metric=metric, bytes=round(value), low_bytes=round(value * low), high_bytes=round(value * high))


def communicators(job: Job) -> int:
    """Process groups with more than one rank on this rank: the world, and one a parallel dimension."""
    layout = job.layout
    if layout.ranks == 1 or layout.sharding == "pipeline_naive":
        return 0
    dimensions = (layout.tp, layout.pp, layout.cp, layout.ep)
    return 1 + sum(size > 1 for size in dimensions)
