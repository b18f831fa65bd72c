"""When a job will be ended, by this node's own clock."""

from dataclasses import dataclass

PROLOGUE_S = 600.0
"""A node whose clock shows more than this between SLURM's start and the script's has a clock that is ahead."""


@dataclass(frozen=True, slots=True)
class End:
    """The moment, and what was odd about it."""

    time: float
    """Unix seconds by this node's clock."""
    note: str = ""


def end_here(*, began: float, start: float | None, end: float | None, limit_s: float) -> End:
    """The end of a job that began at `began` by this node's clock, and runs from `start` to `end` by the controller's.

    The job has `end - start` seconds, the script's own prologue among them. Where the clocks agree, the controller's
    `end` is the truth; a node that is behind would take it for later than it is, one that is far ahead for over. Never
    later than `limit_s` after `began`, which the run file grants.
    """
    own = began + limit_s
    if start is None or end is None:
        return End(own, "the queue did not say when this job ends; the run file's time limit counts")
    granted = began + (end - start)
    if began < start - 1.0:
        text = f"this node's clock is {start - began:.0f} s behind SLURM's"
        return End(min(own, granted), text)
    if began > start + PROLOGUE_S:
        return End(min(own, granted), f"this node's clock is {began - start:.0f} s ahead of SLURM's, or it began late")
    return End(min(own, end))
