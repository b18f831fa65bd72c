"""One link of a chain, as its job runs it: look back, queue the next one, work, save in time, write down how it ended.

python -m gatewright.campaign.link STAGE_FOLDER -- COMMAND…
"""

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gatewright.campaign.advance import advance
from gatewright.campaign.child import Signals, supervise
from gatewright.campaign.decide import Go, Halt, next_step
from gatewright.campaign.ending import Ending, ending_of_killed, judge_ending
from gatewright.campaign.fingerprint import is_done, stage_fingerprint
from gatewright.campaign.folder import StageFolder, newest_checkpoint, write_json
from gatewright.campaign.ledger import update_ledger
from gatewright.campaign.progress import RunProgress, read_progress
from gatewright.campaign.queue import here
from gatewright.campaign.slurm import QueueRefused, QueueSilent
from gatewright.campaign.this_job import (
    Link,
    QueueWatch,
    ensure_successor,
    keep_trying,
    queue_away_from,
    say,
    waiting_jobs,
)
from gatewright.spec.campaign import DONE, FAILED, HOPELESS, NO_PROGRESS, SAVED, Life, Outcome
from gatewright.spec.errors import GatewrightError

EXIT_CODES: dict[Outcome, int] = {"done": DONE, "left": DONE, "saved": SAVED, "hopeless": HOPELESS}
KILLED = 137
"""As a shell calls SIGKILL: for a command that did not come to say how it ended."""
LOCK_WAIT_S = 60.0


def main() -> None:
    """Runs the link and ends the process with its exit code."""
    signals, began = Signals(), time.time()
    arguments = sys.argv[1:]
    cut, link_folder = arguments.index("--"), arguments[0]
    try:
        queue, me = here()
        code = run_link(
            Link(
                folder=StageFolder(Path(link_folder).absolute()),
                command=arguments[cut + 1 :],
                queue=queue,
                me=me,
                began=began,
                signals=signals,
            )
        )
    except GatewrightError as error:
        say(f"error: {error}")
        code = error.exit_code
    except OSError as error:
        say(f"error: {error.filename or link_folder}: {error.strerror}; this link cannot write down what it does")
        code = FAILED
    sys.exit(code)


def run_link(link: Link) -> int:
    """The life of a link, from top to bottom; returns its exit code."""
    close_unfinished(link)
    if is_done(link.stage, link.jobs, link.campaign):
        return leave(link, "the stage is done")
    if link.folder.halt.exists():
        return leave(link, "the chain was halted")
    step = next_step(past_lives(link), links=link.stage.links)
    if isinstance(step, Halt):
        halt(link, step.reason)
        return NO_PROGRESS

    life = Life(
        stage=link.stage.name,
        job=link.me.job,
        restart=link.me.restart,
        submission=link.campaign.submission,
        started=link.began,
        nodes=link.me.nodes,
        checkpoint_before=newest_checkpoint(link.run_folder),
    )
    link.folder.write_life(life)
    if link.me.restart:  # requeued a second time it may be held, and a held job keeps its whole chain waiting
        with suppress(QueueSilent):
            link.queue.keep_from_requeue(link.me.job)
    say(f"link {step.number} of {link.stage.links}, {_from(life)}")
    # Also after the last link that is allowed: were it lost to a fault, nobody would be left to go on.
    life = replace(life, successor=ensure_successor(link, exclude=step.exclude))
    link.folder.write_life(life)
    life, ending = work(link, step, life)
    link.folder.write_life(life)
    return settle(link, life, ending)


# --- before the work ----------------------------------------------------------------------------------------------


def close_unfinished(link: Link) -> None:
    """Completes the records of lives that were killed before they could: the queue is asked what became of them."""
    open_lives = [life for life in link.folder.lives() if life.outcome is None and life.key != link.me.key]
    if not open_lives:
        return
    mine, history = [], {}
    with suppress(QueueSilent, QueueRefused):
        mine = link.queue.mine()
        history = link.queue.history([life.job for life in open_lives])
    for life in open_lives:
        end = ending_of_killed(life, mine=mine, history=history, me=link.me.job)
        link.folder.write_life(ended(link, life, end, ended_at=_last_sign(link, life)))


def _last_sign(link: Link, life: Life) -> float:
    """When a killed life was last seen alive: its newest event, within the time before this one began."""
    seen = read_progress(link.run_folder, since=life.started).event_time if link.run_folder else None
    return min(max(seen or life.started, life.started), link.began)


def past_lives(link: Link) -> list[Life]:
    """Those of this submission, before this one."""
    return [
        life for life in link.folder.lives() if life.submission == link.campaign.submission and life.key != link.me.key
    ]


# --- the work -----------------------------------------------------------------------------------------------------


def work(link: Link, step: Go, life: Life) -> tuple[Life, Ending]:
    """Runs the command until it ends or must end; returns the completed record."""
    wait_for_run_folder(link)
    log = link.folder.log(link.me.job)
    offset = log.stat().st_size if log.exists() else 0
    sys.stdout.flush()
    watch = QueueWatch(link, step, successor=life.successor)
    # srun cannot start a step without the controller
    keep_trying(link, watch.ask)
    if life.successor is None:
        watch.next_ask = time.time()
    stop_file = link.folder.stop(link.me.key)
    stop_file.unlink(missing_ok=True)
    code, asked = supervise(
        link.command,
        env={**os.environ, **_environment(link, step)},
        stop_file=stop_file,
        signals=link.signals,
        deadline=link.deadline,
        hand_on=lambda: _hand_on(link),
        tick=watch.tick,
    )
    stop_file.unlink(missing_ok=True)
    code = _own_exit(link, code)
    progress = read_progress(link.run_folder, since=link.began) if link.run_folder else RunProgress()
    life = replace(
        life, end_time=link.deadline.time, successor=watch.successor, exit_code=code, notes=tuple(link.notes)
    )
    ending = judge_ending(
        link.stage, life, code=code, asked=asked, progress=progress, log=log, offset=offset, where=link.where
    )
    return ended(link, life, ending, ended_at=time.time()), ending


def ended(link: Link, life: Life, ending: Ending, *, ended_at: float) -> Life:
    """The record with its end, and the steps that its events show."""
    steps = read_progress(link.run_folder, since=life.started) if link.run_folder else RunProgress()
    return replace(
        life,
        ended=ended_at,
        outcome=ending.outcome,
        reason=ending.reason,
        faulty_nodes=ending.faulty_nodes,
        first_step=(life.checkpoint_before or 0) + 1 if steps.step > (life.checkpoint_before or 0) else None,
        last_step=steps.step or None,
        checkpoint_after=newest_checkpoint(link.run_folder),
        notes=life.notes,
    )


def wait_for_run_folder(link: Link) -> None:
    """A process of the link before may still be dying in the run folder; its lock says so."""
    lock, until = (link.run_folder or Path()) / "lock", time.monotonic() + LOCK_WAIT_S
    while lock.is_file() and time.monotonic() < until and not link.signals.first:
        with suppress(OSError), lock.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.2)


def _own_exit(link: Link, code: int) -> int:
    """The exit code that a command wrote itself: srun's own is 0 as well when the node failed under it."""
    if link.stage.trains:
        return code
    file = link.folder.exit(link.me.key)
    try:
        own = int(file.read_text(encoding="utf-8"))
        file.unlink()
        return own
    except (OSError, ValueError):
        return code or KILLED


def _environment(link: Link, step: Go) -> dict[str, str]:
    """What the trainer, or a command, may want to know of its job."""
    return {
        "GATEWRIGHT_STOP_FILE": str(link.folder.stop(link.me.key)),
        "GATEWRIGHT_EXIT_FILE": str(link.folder.exit(link.me.key)),
        "GATEWRIGHT_END_TIME": f"{link.deadline.time:.3f}",
        "GATEWRIGHT_LINK_STARTED": f"{link.began:.3f}",
        "GATEWRIGHT_LINKS_LEFT": str(link.stage.links - step.number),
    }


def _hand_on(link: Link) -> signal.Signals | None:
    """What the child is sent when this process was signalled.

    The trainer gets SIGUSR1 once it has written an event: before, it would die of it. srun passes that one on; at a
    SIGTERM it ends the step by force. A command has the stop file, and from SLURM its own SIGTERM.
    """
    if not link.stage.trains:
        return signal.SIGTERM if link.queue.kind == "local" else None
    with suppress(OSError):
        if (Path(link.stage.folder or "") / "events.jsonl").stat().st_mtime > link.began:
            return signal.SIGUSR1
    return None


# --- after the work -----------------------------------------------------------------------------------------------


def settle(link: Link, life: Life, ending: Ending) -> int:
    """Acts on the ending: on to the next stages, on with this chain, or halt. The record is on disk already."""
    say(f"{ending.outcome}: {ending.reason}")
    if ending.outcome == "done":
        fingerprint = stage_fingerprint(link.stage, link.jobs, where=link.where)
        write_json(
            link.folder.done,
            {"fingerprint": fingerprint, "config": link.stage.config, "job": link.me.job, "time": time.time()},
        )
        return leave(link, "the stage is done")
    step = next_step([*past_lives(link), life], links=link.stage.links)
    if link.folder.halt.exists():  # cancelled while it worked
        with suppress(QueueSilent):
            link.queue.cancel(waiting_jobs(link))
    elif isinstance(step, Halt):
        halt(link, step.reason)
    elif life.faulty_nodes and link.queue.kind == "slurm":
        with suppress(QueueSilent, QueueRefused):
            waiting = waiting_jobs(link)
            successor = queue_away_from(link, step.exclude)
            link.queue.cancel(waiting)  # they might go to the faulty node
            say(f"job {successor} goes on, away from {', '.join(step.exclude)}")
    elif link.queue.kind == "slurm":
        keep_trying(link, lambda: ensure_successor(link, exclude=step.exclude) is not None)
    update_ledger(link.jobs, link.campaign)
    return EXIT_CODES.get(ending.outcome, FAILED)


def leave(link: Link, why: str) -> int:
    """Nothing is left to do here: the stages that waited are queued, and this chain's other jobs taken out."""
    say(f"{why}; nothing left to do in this chain")
    if is_done(link.stage, link.jobs, link.campaign):
        with suppress(QueueSilent):
            advance(
                link.campaign, link.jobs, link.queue, queued=lambda new: say(f"queued {new.stage} as job {new.job}")
            )
    with suppress(QueueSilent):
        link.queue.cancel(waiting_jobs(link))
    update_ledger(link.jobs, link.campaign)
    return DONE


def halt(link: Link, reason: str) -> None:
    """Writes down that the chain stops, and takes its waiting jobs out of the queue."""
    say(f"the chain stops here: {reason}")
    write_json(link.folder.halt, {"reason": reason, "job": link.me.job, "time": time.time()})
    with suppress(QueueSilent):
        link.queue.cancel(waiting_jobs(link))
    update_ledger(link.jobs, link.campaign)


def _from(life: Life) -> str:
    return "from the beginning" if life.checkpoint_before is None else f"from step {life.checkpoint_before}"


if __name__ == "__main__":
    main()
