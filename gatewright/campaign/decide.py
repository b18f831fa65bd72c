"""What a link does next, from what happened before: go on, leave, or halt the chain. A pure function of the records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gatewright.spec.campaign import Life

MAX_IDLE, MAX_IDLE_FAULTS = 2, 3
"""Starts in a row without a newer checkpoint after which a chain halts; those that a node or GPU fault ended may be
tried twice more, elsewhere."""
ENDED_FOR_GOOD = ("hopeless", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Work: this is link `number` of those allowed."""

    number: int
    exclude: tuple[str, ...]
    """Nodes that failed."""


@dataclass(frozen=True, slots=True)
class Halt:
    """The chain stops, and a person must look."""

    reason: str


def next_step(past: Sequence[Life], *, links: int) -> Go | Halt:
    """Decides from the lives of this submission that ended before, the earliest first.

    Those that had nothing to do (`left`) do not count; those that a node or GPU fault ended cost no link.
    """
    worked = [life for life in past if life.outcome not in (None, "left")]
    if worked and worked[-1].outcome in ENDED_FOR_GOOD:
        return Halt(worked[-1].reason)
    idle = _trailing_idle(worked)
    faults = [life for life in idle if life.outcome == "fault"]
    if len(idle) - len(faults) >= MAX_IDLE or len(faults) >= MAX_IDLE_FAULTS:
        last = "; ".join(f"job {life.job}: {life.reason or life.outcome}" for life in idle[-MAX_IDLE_FAULTS:])
        return Halt(f"{len(idle)} links in a row ended without a newer checkpoint ({last})")
    used = sum(life.outcome != "fault" for life in worked)
    if used >= links:
        return Halt(f"all {links} links are used up; raise cluster.links and submit again to go on")
    exclude = dict.fromkeys(node for life in worked for node in life.faulty_nodes)
    return Go(number=used + 1, exclude=tuple(exclude))


def _trailing_idle(worked: Sequence[Life]) -> list[Life]:
    """The last lives in a row that left no newer checkpoint; one saved after a life's record was closed counts too."""
    idle: list[Life] = []
    found_later: int | None = None
    for life in reversed(worked):
        if life.progressed or (found_later or 0) > (life.checkpoint_before or 0):
            break
        idle.insert(0, life)
        found_later = life.checkpoint_before
    return idle


Retry = Literal["again", "elsewhere", "never"]

ELSEWHERE = {
    "node_fail",
    "gpu_fault_hsa",
    "gpu_fault_xid",
    "no_gpu",
    "rccl_hang",
    "nccl_timeout",
    "nccl_error",
    "nccl_remote",
}
AGAIN = {
    "host_oom",
    "time_limit",
    "preempted",
    "requeued",
    "cancelled",
    "terminated",
    "signal_not_delivered",
    "port_in_use",
    "rank_failed",
}


def retry_of(kind: str | None) -> Retry:
    """How a failure that the doctor calls `kind` is met.

    A failure without a name may be tried again: the rule on progress bounds it. So may a process that the host killed
    for memory, since others may have filled it; a GPU that is too small stays too small.
    """
    if kind in ELSEWHERE:
        return "elsewhere"
    return "again" if kind is None or kind in AGAIN else "never"
