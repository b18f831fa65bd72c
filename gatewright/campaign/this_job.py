"""The job that a link runs in: its stage, its place in the queue, and the job that is to go on after it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gatewright.campaign.child import Deadline, Signals
from gatewright.campaign.clock import end_here
from gatewright.campaign.decide import Go
from gatewright.campaign.folder import JobsFolder, JobsFolderError, StageFolder
from gatewright.campaign.queue import Me, Queue
from gatewright.campaign.slurm import QueueRefused, QueueSilent
from gatewright.spec.campaign import Campaign, Stage

CONTROLLER_WAIT_S = 600.0
LEAST_ASK_S, MOST_ASK_S = 5.0, 120.0
"""How often the queue is asked when this job ends; the more often, the nearer the end is."""


@dataclass(slots=True)
class Link:
    """This job: where it works, and what it has seen of the queue so far."""

    folder: StageFolder
    command: Sequence[str]
    queue: Queue
    me: Me
    began: float
    signals: Signals
    jobs: JobsFolder = field(init=False)
    campaign: Campaign = field(init=False)
    stage: Stage = field(init=False)
    deadline: Deadline = field(init=False)
    notes: dict[str, None] = field(default_factory=dict)
    """What went on besides, each once."""

    def __post_init__(self) -> None:
        self.jobs = JobsFolder(self.folder.path.parent)
        campaign = self.jobs.campaign()
        if campaign is None:
            raise JobsFolderError(f"{self.jobs.path} holds no campaign; submit it again")
        self.campaign, self.stage = campaign, campaign.stage(self.folder.path.name)
        self.deadline = Deadline(self.began + self.stage.resources.time_limit_s, self.stage.signal_lead_s)

    @property
    def run_folder(self) -> Path | None:
        return Path(self.stage.folder) if self.stage.folder else None

    @property
    def where(self) -> Path:
        return Path(self.campaign.where)


def ensure_successor(link: Link, *, exclude: Sequence[str]) -> str | None:
    """The job that waits to go on after this one; queued here unless it waits already. None: SLURM did not take it."""
    if link.queue.kind == "local":
        return None
    try:
        waiting = waiting_jobs(link)
        return waiting[0] if waiting else queue_away_from(link, exclude)
    except (QueueSilent, QueueRefused) as error:
        link.notes[f"no successor was queued at first: {error}"] = None
        return None


def queue_away_from(link: Link, exclude: Sequence[str]) -> str:
    """Queues the script, away from nodes that failed where enough others are left."""
    try:
        return link.queue.submit(link.folder.script, exclude=exclude)
    except QueueRefused:
        if not exclude:
            raise
        say(f"SLURM has not enough nodes besides {', '.join(exclude)}: they may be taken again")
        return link.queue.submit(link.folder.script)


def keep_trying(link: Link, done: Callable[[], bool]) -> None:
    """Asks again while the controller does not answer, for ten minutes at most, and within this job's time."""
    until = min(time.time() + CONTROLLER_WAIT_S, link.deadline.time - link.deadline.lead_s)
    while not done() and time.time() < until and not link.signals.first:
        time.sleep(LEAST_ASK_S)


def waiting_jobs(link: Link) -> list[str]:
    """Ids of this chain's other jobs that have not begun."""
    jobs = [job for job in link.queue.jobs(link.jobs.comments) if job.comment == link.folder.comment]
    return [job.id for job in jobs if job.id != link.me.job and job.pending]


@dataclass(slots=True)
class QueueWatch:
    """Asks the queue now and then when this job ends, and queues the successor as soon as SLURM takes it."""

    link: Link
    step: Go
    successor: str | None
    next_ask: float = 0.0

    def tick(self) -> None:
        if time.time() >= self.next_ask:
            self.ask()
            if self.successor is None:
                self.successor = ensure_successor(self.link, exclude=self.step.exclude)

    def ask(self) -> bool:
        """Brings the deadline up to what the queue says; whether it answered."""
        answered = True
        link, limit_s = self.link, self.link.stage.resources.time_limit_s
        if link.queue.kind == "slurm":
            try:
                job = next((job for job in link.queue.mine() if job.id == link.me.job), None)
                end = end_here(
                    began=link.began, start=job.start if job else None, end=job.end if job else None, limit_s=limit_s
                )
                self.link.deadline.time = end.time
                if end.note:
                    link.notes[end.note] = None
            except (QueueSilent, QueueRefused) as error:
                link.notes[str(error)] = None
                answered = False
        left_s = self.link.deadline.time - time.time()
        self.next_ask = time.time() + min(max(left_s / 20, LEAST_ASK_S), MOST_ASK_S)
        return answered


def say(text: str) -> None:
    """Into the job's log, with a time and a name before it."""
    print(f"{time.strftime('%H:%M:%S')} gatewright link: {text}", flush=True)
