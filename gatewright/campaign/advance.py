"""Which stages may start, and starting them: whoever finishes a stage, or submits again, queues those that waited."""

from collections.abc import Callable
from dataclasses import dataclass

from gatewright.campaign.fingerprint import is_done
from gatewright.campaign.folder import JobsFolder
from gatewright.campaign.queue import Queue
from gatewright.spec.campaign import Campaign, Stage

LOCK_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A stage that was queued."""

    stage: str
    job: str


def ready(campaign: Campaign, jobs: JobsFolder) -> list[Stage]:
    """Stages that are not done or halted, and whose parents are done; in the order of the file."""
    done = {stage.name for stage in campaign.stages if is_done(stage, jobs, campaign)}
    return [
        stage
        for stage in campaign.stages
        if stage.name not in done and done.issuperset(stage.needs) and not jobs.stage(stage.name).halt.exists()
    ]


def advance(
    campaign: Campaign, jobs: JobsFolder, queue: Queue, *, wait_s: float = LOCK_WAIT_S, queued: Callable[[Queued], None]
) -> None:
    """Queues every ready stage that has no job yet; tells of each as soon as it has an id.

    Two jobs that finish the last two parents at one moment take turns at the folder's lock, so a stage is queued once.
    Without a queue the driver of --local looks by itself.
    """
    if queue.kind == "slurm":
        with jobs.held(wait_s=wait_s):
            queue_ready(campaign, jobs, queue, queued=queued)


def queue_ready(campaign: Campaign, jobs: JobsFolder, queue: Queue, *, queued: Callable[[Queued], None]) -> None:
    """The same, for a caller that holds the folder."""
    waiting = {job.comment for job in queue.jobs(jobs.comments)}
    for stage in ready(campaign, jobs):
        folder = jobs.stage(stage.name)
        if folder.comment not in waiting:
            queued(Queued(stage=stage.name, job=queue.submit(folder.script)))
