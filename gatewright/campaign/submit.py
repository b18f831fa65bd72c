"""Submitting: plan, check, refuse, write everything down, queue what can start; or nothing at all."""

import fcntl
import os
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gatewright.campaign import refuse
from gatewright.campaign.advance import Queued, queue_ready, ready
from gatewright.campaign.build import Built, build
from gatewright.campaign.fingerprint import is_done
from gatewright.campaign.folder import JobsFolder, write_text
from gatewright.campaign.ledger import update_ledger
from gatewright.campaign.progress import RunProgress, read_progress
from gatewright.campaign.queue import Queue
from gatewright.campaign.read import Asked
from gatewright.campaign.slurm import QueueRefused, QueueSilent, Slurm
from gatewright.planner.plan_run import plan_run
from gatewright.preflight.check import check
from gatewright.spec.campaign import Stage, jobs_folder
from gatewright.spec.errors import GatewrightError, RunFileError, UserError
from gatewright.spec.finding import Finding
from gatewright.spec.plan import Plan
from gatewright.spec.read import read_run
from gatewright.spec.run import Run

MEMORY_RULES = ("GW401",)


class Refused(UserError):
    """The campaign would fail or waste what it was given; nothing was submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A campaign that was planned and checked."""

    built: Built
    plans: dict[str, Plan]
    """Of the runs that name their hardware."""
    unplanned: dict[str, str]
    """Why a run has no plan."""
    findings: tuple[Finding, ...]
    """Of the rules of `gatewright check`, those that are no errors."""
    to_do: tuple[str, ...]
    done: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What is in the queue now."""

    prepared: Prepared
    queued: tuple[Queued, ...] = field(default=())


def prepare(asked: Asked, *, queue: str, environ: Mapping[str, str] = os.environ) -> Prepared:
    """Plans and checks without touching the queue or a file. Raises RunFileError, or Refused with every refusal."""
    before = JobsFolder(jobs_folder(asked.folder)).campaign()
    progress = {name: read_progress(run.folder) for name, run in asked.runs.items()}
    saves = {name: seen.save_s for name, seen in progress.items() if seen.save_s is not None}
    built = build(asked, queue=queue, submission=before.submission + 1 if before else 1, saves_s=saves)
    plans, unplanned = _plans(asked)
    refusals: list[str] = []
    for stage in built.campaign.stages:
        if run := asked.runs.get(stage.name):
            refusals += _refuse_run(run, stage, plans.get(stage.name), progress[stage.name], environ)
    findings = _check(built, planned=plans.keys())
    refusals += [f"{one.code} {one.name}: {one.text}" for one in findings if one.severity == "error"]
    if refusals:
        raise Refused(_listing(refusals))
    done = tuple(stage.name for stage in built.campaign.stages if is_done(stage, built.jobs, built.campaign))
    return Prepared(
        built=built,
        plans=plans,
        unplanned=unplanned,
        findings=tuple(one for one in findings if one.severity == "warning"),
        to_do=tuple(stage.name for stage in built.campaign.stages if stage.name not in done),
        done=done,
    )


def submit(prepared: Prepared, queue: Queue, *, say: Callable[[str], None]) -> Submitted:
    """Writes the campaign down and queues the stages that can start.

    Raises Refused, QueueRefused, QueueSilent or RunFileError; what was queued until then is taken out again.
    Without a queue nothing is started: that is the driver's part.
    """
    built = prepared.built
    if isinstance(queue, Slurm):
        refuse_queue(built, queue)
    queued: list[Queued] = []

    def note(new: Queued) -> None:
        queued.append(new)
        say(f"queued {new.stage} as job {new.job}")

    _make(built.jobs)
    with built.jobs.held():
        _refuse_live(built, queue)
        _write(built)
        if queue.kind == "local":
            return Submitted(prepared=prepared)
        try:
            queue_ready(built.campaign, built.jobs, queue, queued=note)
        except BaseException:
            _take_back(built, queue, queued, say=say)
            raise
    update_ledger(built.jobs, built.campaign)
    return Submitted(prepared=prepared, queued=tuple(queued))


# --- before -------------------------------------------------------------------------------------------------------


def _plans(asked: Asked) -> tuple[dict[str, Plan], dict[str, str]]:
    plans, unplanned = {}, {}
    for name, run in asked.runs.items():
        try:
            plans[name] = plan_run(run)
        except GatewrightError as error:
            unplanned[name] = str(error)
    return plans, unplanned


def _refuse_run(
    run: Run, stage: Stage, plan: Plan | None, progress: RunProgress, environ: Mapping[str, str]
) -> list[str]:
    """Every reason why this run must not be submitted as it is."""
    planned = plan.chosen.time.step_s if plan is not None and plan.chosen is not None and plan.chosen.time else None
    answers = [
        refuse.job_id_in_folder(run, environ),
        refuse.save_interval(run, stage, step_s=progress.step_s or planned, measured=progress.step_s is not None),
        refuse.no_room(run.folder, checkpoint_bytes=refuse.checkpoint_bytes(plan, progress)),
    ]
    if plan is not None:
        full = None
        if not plan.fits and run.train.checkpointing != "full":
            train = run.train.model_copy(update={"checkpointing": "full"})
            full = plan_run(run.model_copy(update={"train": train}))
        answers.append(refuse.checkpointing_needed(run, plan, full))
    saved = run.folder / "run.yaml"
    if saved.is_file() and any((run.folder / "checkpoints").glob("step-*/manifest.json")):
        answers.append(refuse.other_settings(read_run(saved), run))
    return [answer for answer in answers if answer is not None]


def _check(built: Built, *, planned: Collection[str]) -> tuple[Finding, ...]:
    """The rules of `gatewright check` over each run and its job script together.

    Whether the memory suffices is the plan's word, where there is one: it also knows the layouts that `auto` may take.
    """
    found: dict[tuple[str, str], Finding] = {}
    for name, text in built.run_files.items():
        with _temporary_folder() as folder:
            files = [folder / f"{name}.yaml", folder / f"{name}.sbatch"]
            kept = str(built.jobs.stage(name).run_file)  # there may be an older one at that place
            script = built.scripts[name].replace(shlex.quote(kept), shlex.quote(str(files[0])))
            for file, content in zip(files, (text, script), strict=True):
                file.write_text(content, encoding="utf-8")
            for one in check(files, ignore=MEMORY_RULES if name in planned else ()).findings:
                found.setdefault((one.code, one.text), one)
    return tuple(found.values())


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="gatewright-") as name:
            yield Path(name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFileError(f"temporary files cannot be written ({reason}); nothing was submitted. Make room") from None


def refuse_queue(built: Built, queue: Slurm) -> None:
    """Raises Refused for limits that the partitions do not allow."""
    partitions = queue.partitions()
    refusals = [refuse.over_partition_limit(stage, partitions) for stage in built.campaign.stages]
    if wrong := [text for text in refusals if text is not None]:
        raise Refused(_listing(wrong))


# --- writing it down ----------------------------------------------------------------------------------------------


def _make(jobs: JobsFolder) -> None:
    try:
        jobs.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFileError(f"{jobs.path}: cannot be made ({error.strerror}); choose another runs_dir") from None


def _refuse_live(built: Built, queue: Queue) -> None:
    """Raises Refused where a stage is in the queue, or a process works in its run folder."""
    refusals = []
    queued = queue.jobs(built.jobs.comments)
    for stage in built.campaign.stages:
        comment = built.jobs.stage(stage.name).comment
        refusals.append(refuse.already_queued(stage.name, [job.id for job in queued if job.comment == comment]))
        if stage.folder and (holder := _working_in(Path(stage.folder))):
            refusals.append(f"stage {stage.name}: {holder} is working in {stage.folder}; wait for it, or stop it first")
    if wrong := [text for text in refusals if text is not None]:
        raise Refused(_listing(wrong))


def _working_in(run_folder: Path) -> str | None:
    """Who holds the lock of a run folder."""
    try:
        with (run_folder / "lock").open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return file.read(200).decode(errors="replace").strip() or "another process"
    except OSError:
        pass
    return None


def _write(built: Built) -> None:
    """Scripts and run files first, the campaign last: what is not written whole is not submitted. Halts are lifted."""
    try:
        for stage in built.campaign.stages:
            folder = built.jobs.stage(stage.name)
            write_text(folder.script, built.scripts[stage.name])
            if stage.name in built.run_files:
                write_text(folder.run_file, built.run_files[stage.name])
            if stage.name in built.commands:
                write_text(folder.command, built.commands[stage.name])
        built.jobs.write_campaign(built.campaign)
        for stage in built.campaign.stages:
            built.jobs.stage(stage.name).halt.unlink(missing_ok=True)
    except OSError as error:
        raise RunFileError(
            f"{built.jobs.path}: cannot be written ({error.strerror}); nothing was submitted. Make room, or choose "
            "another runs_dir"
        ) from None


def _take_back(built: Built, queue: Queue, queued: list[Queued], *, say: Callable[[str], None]) -> None:
    """Cancels what was queued, and jobs that SLURM took although its answer was lost.

    Where SLURM does not answer, they stay, and are part of the campaign that was written down.
    """
    ids = [new.job for new in queued]
    try:
        stages = {built.jobs.stage(stage.name).comment for stage in ready(built.campaign, built.jobs)}
        jobs = queue.jobs(built.jobs.comments)
        ids = list(dict.fromkeys([*ids, *(job.id for job in jobs if job.comment in stages)]))
        queue.cancel(ids)
        if ids:
            say(f"took out of the queue again: {', '.join(ids)}")
    except (QueueSilent, QueueRefused):
        if ids:
            name = built.campaign.name
            say(f"still in the queue: {', '.join(ids)}; `gatewright cancel {name}` takes them out when SLURM answers")


def _listing(refusals: list[str]) -> str:
    return refusals[0] if len(refusals) == 1 else "\n  ".join([f"{len(refusals)} things to change first:", *refusals])
