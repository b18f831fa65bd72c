"""How a link's work ended, and whether trying again can help; the doctor is asked about failures without a name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gatewright.campaign.advice import advise
from gatewright.campaign.decide import retry_of
from gatewright.campaign.progress import RunProgress, read_progress
from gatewright.campaign.slurm_read import Job, host_list
from gatewright.doctor.diagnosis import judge
from gatewright.doctor.scan import scan_log
from gatewright.doctor.source import chunks
from gatewright.spec.campaign import DONE, HOPELESS, SAVED, Life, Outcome, Stage
from gatewright.spec.errors import UserError
from gatewright.spec.finding import Finding

WRONG_REQUEST = 2
"""Exit code of a command whose request is wrong: nothing to retry."""
FOR_GOOD = (
    "the weights were not updated",
    ": not saved (",
    "the router is ill",
    "does not go on as it was saved",
    "was trained on another",
)
"""Words of the trainer's own errors that come again at every start: not a number, a disk that takes nothing, a router
beyond help, a checkpoint that is not this run's."""
_ERROR = re.compile(r"^(?:\d+: )?error: (.+)")
IN_WORDS: Mapping[str, tuple[Outcome, str]] = {
    "TIMEOUT": ("killed", "the time limit ended it before it had saved"),
    "CANCELLED": ("killed", "cancelled"),
    "PREEMPTED": ("killed", "preempted"),
    "NODE_FAIL": ("fault", "its node failed"),
    "BOOT_FAIL": ("fault", "its node did not boot"),
    "OUT_OF_MEMORY": ("killed", "killed for want of memory"),
}
"""States of SLURM's that say how a job ended which could not say it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a link writes of its end."""

    outcome: Outcome
    reason: str
    faulty_nodes: tuple[str, ...] = ()


def judge_ending(
    stage: Stage,
    life: Life,
    *,
    code: int,
    asked: str,
    progress: RunProgress,
    log: Path | None,
    offset: int,
    where: Path,
) -> Ending:
    """Reads the ending from what the work said of itself, then from its exit code, then from its log."""
    said = progress.stop_reason if stage.trains else None
    # srun also returns 0 when a node failed under it: of a run, only its own word counts
    if said == "finished" or (code == DONE and (not stage.trains or _has_finished(stage))):
        missing = [name for name in stage.outputs if not (where / name).exists()]
        if not missing:
            return Ending(outcome="done", reason="finished")
        return Ending(outcome="failed", reason=f"it ended well, but {', '.join(missing)} is not there")
    if code == HOPELESS or said == "hopeless":
        return Ending(outcome="hopeless", reason=_hopeless(progress, stage))
    if code == SAVED or said in ("interrupted", "saved"):
        return Ending(outcome="saved", reason=progress.stop_detail or asked or "saved")
    if code == WRONG_REQUEST:
        return Ending(outcome="failed", reason=_last_error(log, offset) or "the request is wrong (exit code 2)")
    if said == "failed" and any(words in progress.stop_detail for words in FOR_GOOD):
        return Ending(outcome="failed", reason=progress.stop_detail)
    if asked:
        return Ending(outcome="killed", reason=f"{asked}, and it did not save in time")
    return _by_log(stage, life, code=code, log=log, offset=offset)


def _has_finished(stage: Stage) -> bool:
    """Whether the run said so in an earlier life already: then this one had nothing to do."""
    return stage.folder is not None and read_progress(Path(stage.folder)).stop_reason == "finished"


def _hopeless(progress: RunProgress, stage: Stage) -> str:
    lines = advise(progress.gate, stage) if progress.gate else ()
    return "\n".join(lines) or "it says that it cannot finish in its time (exit code 3)"


def _by_log(stage: Stage, life: Life, *, code: int, log: Path | None, offset: int) -> Ending:
    """What the doctor finds in the lines that this life wrote."""
    root = _root(log, offset)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if root is None:
        return Ending(outcome="crashed", reason=_last_error(log, offset) or f"it ended with {how} and said nothing")
    text = f"{root.code} {root.name}: {root.text}"
    match retry_of(None if root.kind == "unknown" else root.kind):
        case "elsewhere":
            # SLURM itself keeps away from a node that is down, and knows when it is back
            faulty = () if root.kind == "node_fail" else _faulty(root, life)
            return Ending(outcome="fault", reason=text, faulty_nodes=faulty)
        case "again":
            return Ending(outcome="crashed", reason=text)
        case "never":
            return Ending(outcome="failed", reason=text)


def _root(log: Path | None, offset: int) -> Finding | None:
    if log is None:
        return None
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return judge([scan_log(chunks(file, name=str(log)), file=str(log))]).root
    except (OSError, UserError):
        return None


def _faulty(root: Finding, life: Life) -> tuple[str, ...]:
    """The node that the log names, or the only one there was; of several, nobody knows which."""
    nodes = host_list(life.nodes)
    named = [place.node for place in root.places if place.node in nodes]
    if named:
        return (str(named[0]),)
    return nodes if len(nodes) == 1 else ()


def _last_error(log: Path | None, offset: int) -> str:
    """The text behind the last `error:` that a command of ours printed."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(offset, file.seek(0, 2) - 2**16))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((match[1] for line in reversed(lines) if (match := _ERROR.match(line))), "")


def ending_of_killed(life: Life, *, mine: Sequence[Job], history: Mapping[str, Sequence[Job]], me: str) -> Ending:
    """The end of a life that left no record of it: by the job's steps, then by the job, then by what followed."""
    if life.job == me:
        return Ending(outcome="fault", reason="the queue started this job again: its node failed, or it was preempted")
    for job in (*history.get(life.job, ())[1:], *history.get(life.job, ())[:1], *mine):
        if job.id.partition(".")[0] == life.job and job.state in IN_WORDS:
            outcome, reason = IN_WORDS[job.state]
            return Ending(outcome=outcome, reason=reason)
    return Ending(outcome="killed", reason="killed without a word")
