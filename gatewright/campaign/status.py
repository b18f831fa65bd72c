"""How campaigns stand: records first, then what the queue says; a glance at each run's events for its progress."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gatewright.campaign.fingerprint import looks_done
from gatewright.campaign.folder import JobsFolder, StageFolder, newest_checkpoint, read_json
from gatewright.campaign.ledger import entry_of
from gatewright.campaign.progress import RunProgress, glance
from gatewright.campaign.slurm_read import Job
from gatewright.spec.campaign import Campaign, Life, Stage, jobs_folder
from gatewright.spec.errors import UserError

SILENT_S, SILENT_STEPS = 300.0, 20
"""A run that works and has said nothing for so long, and for so many of its steps, is called silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One stage, as a line of the table."""

    name: str
    state: str
    """done, halted, running, queued, waiting (for stages before it), ready (nobody queued it), local."""
    detail: str
    """Why it halted, what it waits for, when it is expected to start."""
    job: str
    links_used: int
    links: int
    step: int
    steps: int
    remaining_s: float | None
    checkpoint: int | None
    loss: float | None
    health: str
    """Empty where nothing is wrong."""
    gpu_hours: float
    usd: float | None
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignStatus:
    name: str
    folder: Path
    stages: tuple[StageStatus, ...]


def find_campaigns(runs_dir: Path) -> list[JobsFolder]:
    """Jobs folders below a folder of runs, by name of the run."""
    return [JobsFolder(file.parent) for file in sorted(runs_dir.glob("*/jobs/campaign.json"))]


def find_campaign(name: str, runs_dir: Path) -> JobsFolder:
    """The campaign meant by its name or its folder. Raises UserError."""
    for folder in (runs_dir / name, Path(name)):
        if (jobs := JobsFolder(jobs_folder(folder))).campaign_file.is_file():
            return jobs
    known = [jobs.path.parent.name for jobs in find_campaigns(runs_dir)]
    hint = f"; there are {', '.join(known[:8])}" if known else ""
    raise UserError(f"no campaign {name} in {runs_dir}/{hint}. `gatewright submit RUN.yaml` starts one")


def status_of(jobs: JobsFolder, queue: Sequence[Job] | None, *, now: float | None = None) -> CampaignStatus:
    """`queue`: your jobs as SLURM has them; None where it could not be asked. Raises UserError for no campaign."""
    campaign = jobs.campaign()
    if campaign is None:
        raise UserError(f"{jobs.path} holds no campaign")
    at = time.time() if now is None else now
    stages = tuple(_stage_status(stage, campaign, jobs, queue, at) for stage in campaign.stages)
    return CampaignStatus(name=campaign.name, folder=jobs.path.parent, stages=stages)


def _stage_status(
    stage: Stage, campaign: Campaign, jobs: JobsFolder, queue: Sequence[Job] | None, now: float
) -> StageStatus:
    folder = jobs.stage(stage.name)
    lives = folder.lives()
    entries = [entry_of(life, campaign, now=_until(life, queue, now)) for life in lives]
    prices = [one.usd for one in entries if one.usd is not None]
    run_folder = Path(stage.folder) if stage.folder else None
    seen = glance(run_folder) if run_folder else RunProgress()
    mine = [job for job in queue or () if job.comment == folder.comment]
    state, detail, job = _state(stage, campaign, jobs, folder, lives, mine, asked=queue is not None)
    of_submission = [life for life in lives if life.submission == campaign.submission and life.outcome != "left"]
    return StageStatus(
        name=stage.name,
        state=state,
        detail=detail,
        job=job,
        links_used=len(of_submission),
        links=stage.links,
        step=seen.step,
        steps=seen.steps,
        remaining_s=None if state == "done" else seen.remaining_s,
        checkpoint=newest_checkpoint(run_folder),
        loss=seen.loss,
        health=_health(seen, state, now),
        gpu_hours=sum(one.gpu_hours for one in entries),
        usd=sum(prices) if prices else None,
        lives=tuple(lives),
    )


def _until(life: Life, queue: Sequence[Job] | None, now: float) -> float:
    """A killed life without an end costs until its job was gone; where nobody knows, until its time limit."""
    if life.outcome is not None:
        return life.ended or now
    job = next((job for job in queue or () if job.id == life.job), None)
    if job is not None and not job.alive and job.end is not None:
        return job.end
    return min(now, life.end_time or now)


def _state(
    stage: Stage,
    campaign: Campaign,
    jobs: JobsFolder,
    folder: StageFolder,
    lives: Sequence[Life],
    mine: Sequence[Job],
    *,
    asked: bool,
) -> tuple[str, str, str]:
    """State, detail and job of a stage: what its own records say, then what the queue says."""
    if looks_done(stage, folder):
        return "done", "", lives[-1].job if lives else ""
    alive = [job for job in mine if job.alive]
    for job in alive:
        if not job.pending:
            return "running", "", job.id
    if folder.halt.exists():
        return "halted", str(read_json(folder.halt)["reason"]), lives[-1].job if lives else ""
    if alive:
        return "queued", _waiting_for(alive[0]), alive[0].id
    waits_for = [need for need in stage.needs if not looks_done(campaign.stage(need), jobs.stage(need))]
    if waits_for:
        return "waiting", f"for {', '.join(waits_for)}", ""
    open_life = next((life for life in lives if life.outcome is None), None)
    if campaign.queue == "local":
        return ("running" if open_life else "ready"), "on this machine", open_life.job if open_life else ""
    if not asked and open_life is not None:
        return "running", "by its record; the queue did not answer", open_life.job
    return "ready", "in no queue; `gatewright submit` again goes on" if asked else "the queue did not answer", ""


def _waiting_for(job: Job) -> str:
    when = f", expected {time.strftime('%d %b %H:%M', time.localtime(job.start))}" if job.start else ""
    release = f"; `scontrol release {job.id}` lets it go on" if "held" in job.reason.lower() else ""
    return f"{job.reason or 'waits'}{when}{release}"


def _health(seen: RunProgress, state: str, now: float) -> str:
    """What a person should look at."""
    if seen.stop_reason == "failed":
        return f"failed: {seen.stop_detail[:80]}"
    if seen.guard is not None and seen.step - int(seen.guard.get("step", 0)) < 200:
        return f"router {seen.guard.get('level')}: {seen.guard.get('action')} at step {seen.guard.get('step')}"
    quiet_s = now - seen.event_time if seen.event_time is not None else 0.0
    if state == "running" and quiet_s > max(SILENT_S, SILENT_STEPS * (seen.step_s or 0.0)):
        return f"silent for {quiet_s / 60:.0f} min"
    return f"{len(seen.warnings)} warning{'s' * (len(seen.warnings) > 1)}" if seen.warnings else ""


def totals(statuses: Iterable[CampaignStatus]) -> tuple[float, float | None]:
    """GPU-hours and dollars of campaigns together."""
    stages = [stage for status in statuses for stage in status.stages]
    prices = [stage.usd for stage in stages if stage.usd is not None]
    return sum(stage.gpu_hours for stage in stages), sum(prices) if prices else None
