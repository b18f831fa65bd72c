"""Cancelling a campaign so that nothing of it comes back: halts first, then the jobs."""

import time
from dataclasses import dataclass

from gatewright.campaign.folder import JobsFolder, write_json, write_text
from gatewright.campaign.ledger import update_ledger
from gatewright.campaign.queue import Queue
from gatewright.spec.errors import UserError

CANCELLED = "cancelled by you"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What was taken out."""

    stages: tuple[str, ...]
    jobs: tuple[str, ...]


def cancel(jobs: JobsFolder, queue: Queue, *, stage: str | None = None) -> Cancelled:
    """Halts the stages that are not done, then cancels their jobs, those that wait before those that work.

    A halt is written before the first job goes, so that a link which starts in between leaves at once. A job that
    works gets SLURM's SIGTERM and saves. Raises UserError for a stage that there is not, QueueSilent.
    """
    campaign = jobs.campaign()
    if campaign is None:
        raise UserError(f"{jobs.path} holds no campaign")
    names = [one.name for one in campaign.stages]
    if stage is not None and stage not in names:
        raise UserError(f"{campaign.name} has no stage {stage!r}; it has {', '.join(names)}")
    chosen = [stage] if stage is not None else names
    halted = []
    for name in chosen:
        folder = jobs.stage(name)
        if not folder.done.exists() and not folder.halt.exists():
            write_json(folder.halt, {"reason": CANCELLED, "job": "", "time": time.time()})
            halted.append(name)
        for life in folder.lives():
            if life.outcome is None:
                write_text(folder.stop(life.key), f"{CANCELLED}\n")
    comments = {jobs.stage(name).comment for name in chosen}
    found = [job for job in queue.jobs(jobs.comments) if job.comment in comments]
    ids = [job.id for job in sorted(found, key=lambda job: not job.pending)]
    queue.cancel(ids)
    update_ledger(jobs, campaign)
    return Cancelled(stages=tuple(halted), jobs=tuple(ids))
