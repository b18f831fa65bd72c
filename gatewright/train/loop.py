"""The training run from its folder to its exit code; its steps are those of train/session.py."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from gatewright.model.coverage import write_coverage
from gatewright.packing.flops import Yardstick
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import find_place
from gatewright.parallel.ranks import Ranks, join_ranks
from gatewright.spec.errors import GatewrightError
from gatewright.spec.event import Event, LayoutChosen, Start, Stop
from gatewright.spec.run import Run
from gatewright.train import checkpoint
from gatewright.train.console import announcement
from gatewright.train.context import exchanges_line
from gatewright.train.deadline import Deadline
from gatewright.train.device import device_name, pick_device, versions
from gatewright.train.events import EventLog
from gatewright.train.folder import open_run_folder
from gatewright.train.heap import return_large_blocks
from gatewright.train.output import output_folder
from gatewright.train.resume import prove_resume
from gatewright.train.session import Session
from gatewright.train.setup import Trainer, set_up
from gatewright.train.state import Progress, read_progress, restore
from gatewright.train.stop import GATE, StopRequest, listen
from gatewright.train.track import open_trackers

FINISHED, HOPELESS, SAVED, INTERRUPTED = 0, 3, 85, 130
ANNOUNCED = "stopping after this step; the run will be saved (Ctrl-C again stops at once)"


def train(run: Run, *, console: Console, why: str = "as the run file says", yardstick: Yardstick | None = None) -> int:
    """Trains `run` to its end, going on from its newest sound checkpoint, and returns the exit code.

    `why`: how the run came to its layout, for the record. `yardstick`: what its speed is measured against.
    0: finished, now or earlier. Saved first: 85 when its time was up or it was asked to stop, 130 after Ctrl-C, 3 when
    it cannot finish in the time it has. Errors of the run are raised, after their event.
    """
    place = find_place()
    layout, device = layout_of(run.parallel, ranks=place.size), pick_device(place.local_rank)
    if device.type == "cpu":
        return_large_blocks()
    with join_ranks(place, layout, device=device, timeout_s=run.timeout_s) as ranks:
        return _train(run, ranks, console=console, why=why, yardstick=yardstick)


def _train(
    run: Run,
    ranks: Ranks,
    *,
    console: Console,
    why: str,
    yardstick: Yardstick | None,
) -> int:
    """The run on this rank. Only the first rank prints, and writes what is not in pieces; all do everything else."""
    with open_run_folder(run, first=ranks.first) as folder, _events(folder, ranks) as events:

        def say(text: str) -> None:
            if ranks.first:
                console.print(text, highlight=False, markup=False, soft_wrap=True)

        # The others wait here until the first has the folder, and has found where to go on.
        newest = ranks.tell(checkpoint.newest_sound(folder / "checkpoints", warn=say) if ranks.first else None)
        if newest and ranks.tell(_is_finished(run, newest)):
            say(f"{run.run} is finished: {newest.step} steps, results in {output_folder(run)}. Nothing to do.")
            return FINISHED

        def log(event: Event) -> None:
            events.write(event)
            for line in announcement(event):
                say(line)

        if not ranks.alone:
            log(LayoutChosen(ranks=ranks.size, layout=ranks.layout.describe(), reason=why))
        session: Session | None = None
        try:
            with listen(ANNOUNCED, say=say, deadline=Deadline.from_environment()) as stop:
                session = _open(run, folder, newest, stop, ranks=ranks, log=log, say=say, yardstick=yardstick)
                with closing(session):
                    session.steps()
        except (GatewrightError, KeyboardInterrupt, RuntimeError) as error:
            reached = session.progress.step if session else newest.step if newest else 0
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            events.write(Stop(step=reached, reason=reason, detail=str(error)))
            raise
        return _end(session.progress, stop, run, events=events, say=say)


def _open(
    run: Run,
    folder: Path,
    newest: checkpoint.Checkpoint | None,
    stop: StopRequest,
    *,
    ranks: Ranks,
    log: Callable[[Event], None],
    say: Callable[[str], None],
    yardstick: Yardstick | None,
) -> Session:
    """Everything set up, and the newest checkpoint taken up where there is one, with the proof that it goes on."""
    trainer = set_up(run, log=log, ranks=ranks)
    if ranks.first:
        write_coverage(trainer.coverage, folder)
    progress = restore(newest.path, trainer=trainer, run=run) if newest else _fresh(trainer)
    log(_start(run, trainer, resumed_step=newest.step if newest else None))
    if line := exchanges_line(trainer.loader):
        say(line)
    if proved := prove_resume(trainer, run, progress):
        log(proved)
    if newest:
        say(f"going on after step {progress.step}/{progress.steps}, from {newest.path}")
    trackers = open_trackers(run, folder) if ranks.first else []
    return Session(
        run=run, folder=folder, trainer=trainer, progress=progress, stop=stop, log=log, say=say, trackers=trackers,
        yardstick=yardstick,
    )  # fmt: skip


def _end(progress: Progress, stop: StopRequest, run: Run, *, events: EventLog, say: Callable[[str], None]) -> int:
    """The last event, the last line, and the exit code."""
    if progress.step == progress.steps:
        events.write(Stop(step=progress.step, reason="finished", detail=""))
        say(f"finished: {progress.step} steps, {progress.tokens:,} tokens; results in {output_folder(run)}")
        return FINISHED
    hopeless = stop.reason == GATE
    reason = "hopeless" if hopeless else "interrupted"
    events.write(Stop(step=progress.step, reason=reason, detail=stop.reason or ""))
    where = f"saved after step {progress.step}/{progress.steps}" if progress.step else "no step was made"
    say(f"{where} ({stop.reason}); start the same command again to go on")
    return HOPELESS if hopeless else INTERRUPTED if stop.reason == "SIGINT" else SAVED


def _events(folder: Path, ranks: Ranks) -> EventLog:
    return EventLog(folder / "events.jsonl" if ranks.first else Path(os.devnull))


def _is_finished(run: Run, newest: checkpoint.Checkpoint) -> bool:
    progress = read_progress(newest.path)
    return progress.step >= progress.steps and output_folder(run).is_dir()


def _fresh(trainer: Trainer) -> Progress:
    return Progress(
        step=0,
        steps=trainer.steps,
        tokens=0,
        target_tokens=0,
        best_loss=None,
        best_step=None,
        fingerprint=trainer.fingerprint,
    )


def _start(run: Run, trainer: Trainer, *, resumed_step: int | None) -> Start:
    return Start(
        run=run.run,
        versions=versions(),
        device=device_name(trainer.device) + ("" if trainer.ranks.alone else f", {trainer.ranks.layout.describe()}"),
        threads=torch.get_num_threads(),
        resumed_step=resumed_step,
        steps=trainer.steps,
    )
