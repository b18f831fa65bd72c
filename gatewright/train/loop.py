"""The training run from its folder to its last step; read it downwards."""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from gatewright.data.ahead import Ahead
from gatewright.model.coverage import write_coverage
from gatewright.model.subset import never_routed_text
from gatewright.parallel.failure import fail_together
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import find_place
from gatewright.parallel.ranks import Ranks, join_ranks
from gatewright.spec.errors import Diverged, GatewrightError, RouterCollapsed
from gatewright.spec.event import Evaluated, Event, Finding, GuardActed, Saved, Start, StepDone, Stop
from gatewright.spec.run import Run
from gatewright.train import checkpoint
from gatewright.train.console import announcement, evaluation_line, step_line
from gatewright.train.context import on_device
from gatewright.train.deadline import Deadline
from gatewright.train.device import device_name, peak_memory_bytes, pick_device, rng_state, set_rng_state, versions
from gatewright.train.diverged import explain_divergence
from gatewright.train.evaluate import evaluate
from gatewright.train.events import EventLog
from gatewright.train.folder import open_run_folder
from gatewright.train.gate import GateKeeper
from gatewright.train.optim import learning_rate
from gatewright.train.output import output_folder, write_output
from gatewright.train.resume import prove_resume, take_proof
from gatewright.train.setup import Trainer, refuse_unsupported, set_up
from gatewright.train.state import Progress, read_progress, restore, write_state
from gatewright.train.step import train_step
from gatewright.train.stop import GATE, Interrupted, StopRequest, listen
from gatewright.train.track import Tracker, open_trackers

FINISHED, HOPELESS, SAVED, INTERRUPTED = 0, 3, 85, 130


def train(run: Run, *, console: Console) -> int:
    """Trains `run` to its end, going on from its newest sound checkpoint, and returns the exit code.

    0: finished, now or earlier. Saved first: 85 when its time was up or it was asked to stop, 130 after Ctrl-C, 3 when
    it cannot finish in the time it has. Errors of the run are raised, after their event.
    """
    findings = refuse_unsupported(run)
    place = find_place()
    layout, device = layout_of(run.parallel, ranks=place.size), pick_device(place.local_rank)
    with join_ranks(place, layout, device=device, timeout_s=run.timeout_s) as ranks, fail_together(ranks):
        return _train(run, findings, ranks, console=console)


def _train(run: Run, findings: list[Finding], ranks: Ranks, *, console: Console) -> int:
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

        for finding in findings:
            log(finding)
        announce = "stopping after this step; the run will be saved (Ctrl-C again stops at once)"
        step_reached = newest.step if newest else 0
        try:
            with listen(announce, say=say, deadline=Deadline.from_environment()) as stop:
                trainer = set_up(run, log=log, ranks=ranks)
                if ranks.first:
                    write_coverage(trainer.coverage, folder)
                progress = restore(newest.path, trainer=trainer, run=run) if newest else _fresh(trainer)
                log(_start(run, trainer, resumed_step=newest.step if newest else None))
                if not ranks.alone:
                    say(f"layout    {ranks.layout.describe()}")
                if proved := prove_resume(trainer, run, progress):
                    log(proved)
                if newest:
                    say(f"going on after step {progress.step}/{progress.steps}, from {newest.path}")
                trackers = open_trackers(run, folder) if ranks.first else []
                ahead = Ahead(trainer.loader)
                try:
                    progress = _steps(run, folder, trainer, ahead, progress, stop, log=log, say=say, trackers=trackers)
                finally:
                    ahead.close()
                    for tracker in trackers:
                        tracker.close()
                step_reached = progress.step
        except (GatewrightError, KeyboardInterrupt, RuntimeError) as error:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            events.write(Stop(step=step_reached, reason=reason, detail=str(error)))
            raise
        if progress.step < progress.steps:
            hopeless = stop.reason == GATE
            events.write(
                Stop(step=progress.step, reason="hopeless" if hopeless else "interrupted", detail=stop.reason or "")
            )
            where = f"saved after step {progress.step}/{progress.steps}" if progress.step else "no step was made"
            say(f"{where} ({stop.reason}); start the same command again to go on")
            return HOPELESS if hopeless else INTERRUPTED if stop.reason == "SIGINT" else SAVED
        events.write(Stop(step=progress.step, reason="finished", detail=""))
        say(f"finished: {progress.step} steps, {progress.tokens:,} tokens; results in {output_folder(run)}")
        return FINISHED


def _events(folder: Path, ranks: Ranks) -> EventLog:
    return EventLog(folder / "events.jsonl" if ranks.first else Path(os.devnull))


def _steps(
    run: Run,
    folder: Path,
    trainer: Trainer,
    ahead: Ahead,
    progress: Progress,
    stop: StopRequest,
    *,
    log: Callable[[Event], None],
    say: Callable[[str], None],
    trackers: list[Tracker],
) -> Progress:
    """The optimizer steps that are left, with their evaluations and saves."""
    recent_step_s: deque[float] = deque(maxlen=20)
    before: Evaluated | None = None
    gate, saved_step = GateKeeper(run, stop.deadline, steps=trainer.steps), progress.step
    if progress.step == 0 and trainer.held_out and not stop.poll():
        before = _evaluate(run, trainer, 0, stop, before=None, log=log, say=say, trackers=trackers)

    if progress.step == 0 and trainer.router:
        log(trainer.router.first)
        if "rollback" in run.router.guard.action:
            _save(run, folder, trainer, progress, stop, log=log)

    while progress.step < trainer.steps and not stop.poll():
        index, began, random = progress.step, time.perf_counter(), rng_state(trainer.device)
        trainer.ranks.mark(index + 1)
        batches = [on_device(batch, trainer.ranks) for batch in ahead.step(index + progress.skipped_steps)]
        data_s = time.perf_counter() - began
        lr = learning_rate(index, steps=trainer.steps, train=run.train)
        router_scale = trainer.router.lr_scale if trainer.router else 0.0
        try:
            result = train_step(
                trainer.model, trainer.head, trainer.optimizer, trainer.gradients, batches,
                lr=lr, clip_norm=run.train.clip_norm, loss_chunk_tokens=run.train.loss_chunk_tokens,
                router=trainer.router.loss if trainer.router else None, router_scale=router_scale,
                before_each=stop.in_step,
            )  # fmt: skip
        except Interrupted:
            set_rng_state(random, trainer.device)
            break
        except Diverged as error:
            raise Diverged(explain_divergence(error, folder, batches, step=index + 1, ranks=trainer.ranks)) from None
        step_s = time.perf_counter() - began

        memory_bytes = peak_memory_bytes(trainer.device)
        by_rank = [] if trainer.ranks.alone else trainer.ranks.gather([step_s, memory_bytes])

        recent_step_s.append(step_s)
        stop.deadline.step_took(step_s)
        done = StepDone(
            step=index + 1,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            target_tokens=result.target_tokens,
            micro_batches=len(batches),
            step_s=step_s,
            data_s=data_s,
            forward_s=result.forward_s,
            backward_s=result.backward_s,
            optimizer_s=result.optimizer_s,
            memory_bytes=memory_bytes,
            rank_step_s=[seconds for seconds, _ in by_rank],
            rank_memory_bytes=[int(count) for _, count in by_rank],
            dropped_tokens=0 if result.dropped is None else int(result.dropped.sum()),
            expert_tokens=[] if result.expert_tokens is None else result.expert_tokens.tolist(),
            dropped_by_layer=[] if result.dropped is None else result.dropped.tolist(),
            data_step=index + progress.skipped_steps,
            balance_loss=result.balance_loss,
            z_loss=result.z_loss,
            router_lr=lr * router_scale if router_scale else None,
        )
        log(done)
        eta_s = statistics.median(recent_step_s) * (trainer.steps - done.step)
        say(step_line(done, steps=trainer.steps, eta_s=eta_s, moe_layers=trainer.moe_layers))
        _track(
            trackers,
            {"loss": done.loss, "lr": lr, "grad_norm": done.grad_norm, "tokens_per_s": done.tokens / step_s},
            done.step,
        )
        progress = replace(
            progress,
            step=done.step,
            tokens=progress.tokens + done.tokens,
            target_tokens=progress.target_tokens + done.target_tokens,
        )

        if trainer.router and result.expert_tokens is not None:
            health, acted = trainer.router.after_step(done.step, result.expert_tokens)
            if health:
                log(health)
            if acted:
                progress, rolled_back = _act(run, folder, trainer, progress, stop, acted, log=log)
                if rolled_back:
                    continue

        last, every = done.step == trainer.steps, run.evaluate.every_steps if run.evaluate else None
        evaluated = None
        if trainer.held_out and (last or (every and done.step % every == 0)):
            evaluated = _evaluate(run, trainer, done.step, stop, before=before, log=log, say=say, trackers=trackers)
        if evaluated is not None and (progress.best_loss is None or evaluated.loss < progress.best_loss):
            progress = replace(progress, best_loss=evaluated.loss, best_step=done.step)
        best = evaluated is not None and progress.best_step == done.step
        at_gate = gate.stands_before(done.step, step_s=step_s)
        if last or best or at_gate or done.step % run.train.save_every_steps == 0:
            if last:
                write_output(run, trainer)
                if silent := trainer.router.silent_experts() if trainer.router and run.adapter else {}:
                    log(Finding(severity="warning", text=never_routed_text(silent)))
            _save(run, folder, trainer, progress, stop, log=log)
            saved_step = done.step
        if at_gate and _is_hopeless(gate, done.step, ranks=trainer.ranks, log=log):
            stop.reason = GATE
    if progress.step != saved_step:
        _save(run, folder, trainer, progress, stop, log=log)
    return progress


def _is_hopeless(gate: GateKeeper, step: int, *, ranks: Ranks, log: Callable[[Event], None]) -> bool:
    """Asks the gate of the first rank, just after a save, so that one has been measured."""
    checked = ranks.tell(gate.ask(step))
    log(checked)
    if finding := gate.sparse_saves(checked):
        log(finding)
    return checked.hopeless


def _save(
    run: Run, folder: Path, trainer: Trainer, progress: Progress, stop: StopRequest, *, log: Callable[[Event], None]
) -> None:
    began, root = time.perf_counter(), folder / "checkpoints"
    progress = replace(progress, proof=take_proof(trainer, run, progress))
    saved = checkpoint.save(
        root, step=progress.step, write=lambda path: write_state(path, trainer=trainer, run=run, progress=progress),
        ranks=trainer.ranks,
    )  # fmt: skip
    best = root / f"step-{progress.best_step:08d}" if progress.best_step is not None else None
    spare = [best] if best else []
    if trainer.router and "rollback" in run.router.guard.action:
        healthy = checkpoint.newest_up_to(root, trainer.router.guard.healthy_step)
        spare += [healthy.path] if healthy else []
    if trainer.ranks.first:
        checkpoint.prune(root, keep=run.train.keep_checkpoints, spare=spare)
    seconds = time.perf_counter() - began
    stop.deadline.save_took(seconds)
    log(Saved(step=saved.step, path=str(saved.path), bytes=saved.bytes, seconds=seconds, best=best == saved.path))


def _act(
    run: Run,
    folder: Path,
    trainer: Trainer,
    progress: Progress,
    stop: StopRequest,
    acted: GuardActed,
    *,
    log: Callable[[Event], None],
) -> tuple[Progress, bool]:
    """Carries out what the guard decided, as far as the router alone cannot, and logs it.

    Returns the progress to go on from and whether it was rolled back. Raises RouterCollapsed for `stop`.
    """
    assert trainer.router
    if acted.action == "reset":
        trainer.router.reset(trainer.optimizer, trainer.gradients.owned)
    if acted.action == "stop":
        log(acted)
        raise RouterCollapsed(
            f"step {acted.step}: the router is ill and router.guard says stop: {'; '.join(acted.reasons)}. Lower "
            "train.lr or router.lr_scale, set router.balance, or freeze the router; earlier checkpoints are kept"
        )
    if acted.action != "rollback":
        log(acted)
        return progress, False

    trainer.ranks.wait()
    found = checkpoint.newest_up_to(folder / "checkpoints", trainer.router.guard.healthy_step)
    assert found, "a run whose guard may roll back begins with a checkpoint"
    remembered = trainer.router.guard
    then = restore(found.path, trainer=trainer, run=run)
    trainer.router.remember(remembered)
    log(replace(acted, resumed_step=then.step))
    skipped = progress.skipped_steps
    if run.router.guard.after_rollback == "skip":
        skipped += progress.step - then.step
    progress = replace(then, skipped_steps=skipped)
    # What was undone must not be what a restart finds newest, and it must find what the guard remembers.
    checkpoint.discard_after(folder / "checkpoints", then.step)
    _save(run, folder, trainer, progress, stop, log=log)
    return progress, True


def _evaluate(
    run: Run,
    trainer: Trainer,
    step: int,
    stop: StopRequest,
    *,
    before: Evaluated | None,
    log: Callable[[Event], None],
    say: Callable[[str], None],
    trackers: list[Tracker],
) -> Evaluated | None:
    """Held-out loss now; the greedy answers only before the first and after the last step, since they are slow.

    None when the run was asked to stop meanwhile.
    """
    assert run.evaluate and trainer.held_out
    done = evaluate(
        trainer.model,
        trainer.head,
        trainer.tokenizer,
        trainer.held_out,
        step=step,
        questions=trainer.questions if step in (0, trainer.steps) else [],
        max_new_tokens=run.evaluate.max_new_tokens,
        loss_chunk_tokens=run.train.loss_chunk_tokens,
        device=trainer.device,
        ranks=trainer.ranks,
        stopping=stop.poll_alone,
    )
    if done is None:
        return None
    stop.deadline.evaluation_took(done.seconds)
    log(done)
    say(evaluation_line(done, before=before))
    _track(trackers, {"held_out_loss": done.loss}, step)
    return done


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


def _track(trackers: list[Tracker], values: dict[str, float], step: int) -> None:
    for tracker in trackers:
        tracker.log(values, step=step)
