"""What is refused before anything is submitted: each refusal is a function of facts, and returns its sentence."""

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gatewright.campaign.progress import RunProgress
from gatewright.campaign.sbatch import clock
from gatewright.spec.campaign import Stage
from gatewright.spec.plan import Plan
from gatewright.spec.run import Run
from gatewright.spec.same_run import changed

CHECKPOINTS = 3
"""Checkpoints that must fit: two that are kept, and the one being written."""
STARTUP_S = 120.0
"""Taken for the start of a link where none was measured."""


def save_interval(
    run: Run, stage: Stage, *, step_s: float | None, startup_s: float = STARTUP_S, measured: bool = False
) -> str | None:
    """A save interval over half a link loses up to that much at every fault, and may leave a link without any save."""
    if step_s is None or stage.links == 1:
        return None
    limit_s = stage.resources.time_limit_s
    useful_s = limit_s - min(startup_s, limit_s / 10) - min(stage.signal_lead_s, limit_s / 4)
    fitting = useful_s / step_s
    if run.train.save_every_steps <= fitting / 2:
        return None
    source = "measured" if measured else "as the planner sees them"
    return (
        f"train.save_every_steps = {run.train.save_every_steps}: a link of {clock(limit_s)} makes {fitting:,.0f} steps "
        f"of {step_s:.3g} s ({source}); set it to {max(1, math.floor(fitting / 2)):,} or less, or raise "
        "cluster.time_limit"
    )


def job_id_in_folder(run: Run, environ: Mapping[str, str]) -> str | None:
    """A folder named by the job is another one for every link: each would begin at step 0."""
    text = f"{run.runs_dir}/{run.run}"
    job = environ.get("SLURM_JOB_ID", "")
    named = re.search(r"%[jJAa]|\$\{?SLURM_\w*JOB\w*\}?|\{job(_id)?\}", text)
    if named is None and not (job and job in re.split(r"[/._-]", text)):
        return None
    found = named[0] if named else job
    return (
        f"runs_dir and run: {text} holds a job id ({found}), so every link would begin anew in its own folder; name "
        "the run, and nothing else"
    )


def checkpointing_needed(run: Run, plan: Plan, full: Plan | None) -> str | None:
    """`full` is the plan with train.checkpointing full; None where that is what was planned."""
    if plan.fits:
        return None
    if full is not None and full.fits:
        return (
            f"train.checkpointing = {run.train.checkpointing}: {plan.gpus} × {plan.gpu} do not hold this run without "
            "gradient checkpointing; set train.checkpointing: full"
        )
    enough = f"; {plan.fewest_gpus} would do" if plan.fewest_gpus else ""
    return f"the plan does not fit {plan.gpus} × {plan.gpu}{enough}: `gatewright plan` shows what is too large"


def no_room(run_folder: Path, *, checkpoint_bytes: int | None) -> str | None:
    """Room, and file names, for three checkpoints on the disk of the run folder."""
    place = next(folder for folder in (run_folder.absolute(), *run_folder.absolute().parents) if folder.is_dir())
    held = os.statvfs(place)
    if held.f_files and held.f_favail < CHECKPOINTS * 64:
        return f"{place}: only {held.f_favail:,} more files may be made there (inodes); remove some, or set runs_dir"
    if checkpoint_bytes is None:
        return None
    free, wanted = shutil.disk_usage(place).free, CHECKPOINTS * checkpoint_bytes
    if free >= wanted:
        return None
    return (
        f"{place}: {free / 2**30:.1f} GiB are free, {CHECKPOINTS} checkpoints of {checkpoint_bytes / 2**30:.1f} GiB "
        f"need {wanted / 2**30:.1f}; make room, or set runs_dir to another disk"
    )


def checkpoint_bytes(plan: Plan | None, progress: RunProgress) -> int | None:
    """What the last save wrote; before one, float32 weights and two moments of all that trains."""
    if progress.save_bytes:
        return progress.save_bytes
    return None if plan is None else 12 * plan.trainable_parameters


def over_partition_limit(
    stage: Stage, partitions: Mapping[str, tuple[float | None, str]], *, setting: str = "cluster.time_limit"
) -> str | None:
    """A limit over the partition's is refused by SLURM, or waits for ever; a partition that there is not, too."""
    name = stage.resources.partition or ""
    if not partitions:
        return None
    if name not in partitions:
        known = ", ".join(sorted(filter(None, partitions)))
        return f"stage {stage.name}: no partition {name!r}; there are {known}. Set cluster.partition" if name else None
    limit_s, available = partitions[name]
    if available not in ("up", ""):
        return f"stage {stage.name}: partition {name} is {available}; take another cluster.partition"
    if limit_s is None or stage.resources.time_limit_s <= limit_s:
        return None
    return (
        f"stage {stage.name}: {setting} is {clock(stage.resources.time_limit_s)}, partition {name or 'by default'} "
        f"allows {clock(int(limit_s))}; lower it, and raise cluster.links instead"
    )


def other_settings(saved: Run, run: Run) -> str | None:
    """A resume whose settings differ where they move a weight: each field, then and now."""
    differing = changed(saved, run)
    if not differing:
        return None
    lines = "\n".join(f"  {field}: {then!r} then, {now!r} now" for field, then, now in differing)
    return (
        f"{run.folder} has checkpoints of a run with other settings:\n{lines}\n"
        "give this run another name, or set these back to go on with the old one"
    )


def already_queued(stage: str, jobs: Sequence[str]) -> str | None:
    """Another chain of the same stage in the queue."""
    if not jobs:
        return None
    return (
        f"stage {stage} is in the queue already: job {', '.join(jobs)}. `gatewright status` shows it; `gatewright "
        "cancel` takes it out"
    )
