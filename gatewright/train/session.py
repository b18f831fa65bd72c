"""The optimizer steps of a run, its evaluations and saves, and what the router's guard does; read it downwards."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gatewright.data.ahead import Ahead
from gatewright.data.batch import Batch
from gatewright.model.subset import never_routed_text
from gatewright.packing.flops import Yardstick
from gatewright.spec.errors import Diverged, RouterCollapsed
from gatewright.spec.event import Evaluated, Event, Finding, GuardActed, Saved, StepDone
from gatewright.spec.run import Parallel, Run
from gatewright.train import checkpoint
from gatewright.train.console import evaluation_line, step_line
from gatewright.train.context import fallback, on_device
from gatewright.train.device import peak_memory_bytes, reserved_memory_bytes, rng_state, set_rng_state
from gatewright.train.diverged import explain_divergence
from gatewright.train.evaluate import evaluate
from gatewright.train.gate import GateKeeper
from gatewright.train.host import HostCopy
from gatewright.train.optim import learning_rate
from gatewright.train.output import write_output
from gatewright.train.resume import take_proof
from gatewright.train.save import Saving
from gatewright.train.setup import Trainer
from gatewright.train.state import Progress, restore, take_state
from gatewright.train.step import StepResult, train_step
from gatewright.train.stop import GATE, Interrupted, StopRequest
from gatewright.train.track import Tracker

RECENT_STEPS = 20
"""Steps whose median gives the time that is left."""


@dataclass(kw_only=True)
class Session:
    """A run at work in this process."""

    run: Run
    folder: Path
    trainer: Trainer
    progress: Progress
    """Where the run is; replaced as it goes on."""
    stop: StopRequest
    log: Callable[[Event], None]
    say: Callable[[str], None]
    trackers: list[Tracker]
    yardstick: Yardstick | None = None
    """What speed is measured against; None where the model's FLOPs or the device's rate are not known."""
    saved_step: int = field(init=False)
    """Step of the newest checkpoint, complete or on its way."""
    saving: Saving | None = field(init=False, default=None)
    """The save under way: one at most."""
    host: HostCopy = field(init=False, default_factory=HostCopy)
    before: Evaluated | None = field(init=False, default=None)
    """The evaluation before training, where this process made it."""
    fallback_told: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.ahead = Ahead(self.trainer.loader)
        self.gate = GateKeeper(self.run, self.stop.deadline, steps=self.trainer.steps)
        self.recent_step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.saved_step = self.progress.step

    def steps(self) -> None:
        """Makes the steps that are left; returns early, with everything saved, when asked to stop."""
        if self.progress.step == 0:
            self._begin()
        try:
            while self.progress.step < self.trainer.steps and not self.stop.poll():
                self._note_save()
                result = self._step()
                if result is None:
                    break
                if self._rolled_back(result):
                    continue
                self._evaluate_and_save()
            if self.progress.step != self.saved_step:
                self._save()
        except (Diverged, RouterCollapsed):
            self._finish_save()  # all ranks come here together, and what was healthy then is worth keeping
            raise
        self._finish_save()

    def close(self) -> None:
        """Lets go of the threads that make batches and write, and of the trackers."""
        self.ahead.close()
        if self.saving:
            self.saving.abandon()
        for tracker in self.trackers:
            tracker.close()

    def _begin(self) -> None:
        if self.trainer.held_out and not self.stop.poll():
            self.before = self._evaluate()
        if self.trainer.router:
            self.log(self.trainer.router.first)
            if "rollback" in self.run.router.guard.action:
                self._save()

    def _step(self) -> StepResult | None:
        """One optimizer step, logged; None when it was broken off by a request to stop, as if it had not begun."""
        trainer, train = self.trainer, self.run.train
        index, data_step = self.progress.step, self.progress.step + self.progress.skipped_steps
        began, random = time.perf_counter(), rng_state(trainer.device)
        trainer.ranks.mark(index + 1)
        made = self.ahead.step(data_step)
        flops = self.yardstick.flops.of_slices(s for batch in made for s in batch.slices) if self.yardstick else 0.0
        batches = [on_device(batch, trainer.ranks) for batch in made]
        data_s = time.perf_counter() - began
        lr = learning_rate(index, steps=trainer.steps, train=train)
        router_scale = trainer.router.lr_scale if trainer.router else 0.0
        try:
            result = train_step(
                trainer.model, trainer.head, trainer.optimizer, trainer.gradients, batches,
                lr=lr, clip_norm=train.clip_norm, loss_chunk_tokens=train.loss_chunk_tokens,
                router=trainer.router.loss if trainer.router else None, router_scale=router_scale,
                before_each=self.stop.in_step,
            )  # fmt: skip
        except Interrupted:
            set_rng_state(random, trainer.device)
            return None
        except Diverged as error:
            said = explain_divergence(error, self.folder, batches, step=index + 1, ranks=trainer.ranks)
            raise Diverged(said) from None
        step_s = time.perf_counter() - began
        self.stop.deadline.step_took(step_s)
        self.recent_step_s.append(step_s)
        mine = [step_s, data_s, result.wait_s, flops]
        self._tell(self._step_done(result, batches, lr=lr, router_scale=router_scale, mine=mine))
        self.progress = replace(
            self.progress,
            step=index + 1,
            tokens=self.progress.tokens + result.tokens,
            target_tokens=self.progress.target_tokens + result.target_tokens,
        )
        return result

    def _step_done(
        self, result: StepResult, batches: list[Batch], *, lr: float, router_scale: float, mine: list[float]
    ) -> StepDone:
        """The step as an event. `mine`: seconds of the step, in data and in collectives, and FLOPs, of this rank."""
        ranks, device = self.trainer.ranks, self.trainer.device
        memory = [peak_memory_bytes(device), reserved_memory_bytes(device)]
        rows = ranks.gather([*mine, *memory])
        step_s_R, data_s_R, wait_s_R, flops_R, memory_R, reserved_R = zip(*rows, strict=True)
        step_s, many = mine[0], not ranks.alone
        return StepDone(
            step=self.progress.step + 1,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            target_tokens=result.target_tokens,
            micro_batches=len(batches),
            step_s=step_s,
            data_s=mine[1],
            forward_s=result.forward_s,
            backward_s=result.backward_s,
            optimizer_s=result.optimizer_s,
            memory_bytes=memory[0],
            reserved_bytes=memory[1],
            rank_step_s=list(step_s_R) if many else [],
            rank_data_s=list(data_s_R) if many else [],
            rank_wait_s=list(wait_s_R) if many else [],
            rank_memory_bytes=[int(count) for count in memory_R] if many else [],
            rank_reserved_bytes=[int(count) for count in reserved_R] if many else [],
            mfu=self.yardstick.mfu(sum(flops_R), seconds=step_s, ranks=ranks.size) if self.yardstick else None,
            dropped_tokens=0 if result.dropped is None else int(result.dropped.sum()),
            expert_tokens=[] if result.expert_tokens is None else result.expert_tokens.tolist(),
            dropped_by_layer=[] if result.dropped is None else result.dropped.tolist(),
            data_step=self.progress.step + self.progress.skipped_steps,
            balance_loss=result.balance_loss,
            z_loss=result.z_loss,
            router_lr=lr * router_scale if router_scale else None,
            exchanges=dict(Counter(batch.exchange_name for batch in batches if batch.exchange_name is not None)),
        )

    def _tell(self, done: StepDone) -> None:
        self.log(done)
        self._tell_of_fallback(done)
        eta_s = statistics.median(self.recent_step_s) * (self.trainer.steps - done.step)
        self.say(step_line(done, steps=self.trainer.steps, eta_s=eta_s, moe_layers=self.trainer.moe_layers))
        shown = {"loss": done.loss, "lr": done.lr, "grad_norm": done.grad_norm}
        speed = {"tokens_per_s": done.tokens_per_s, "tokens_per_s_rank": done.tokens_per_s_rank}
        also = {"mfu": done.mfu, "spread": done.spread}
        self._track(shown | speed | {name: value for name, value in also.items() if value is not None}, step=done.step)

    def _tell_of_fallback(self, done: StepDone) -> None:
        """Once, where a micro-batch could not make the exchange that the run file asks for."""
        cut = self.trainer.loader.cut
        if cut is None or self.fallback_told:
            return
        assert isinstance(self.run.parallel, Parallel)
        if finding := fallback(self.run.parallel.exchange, cut.heads, done.exchanges):
            self.fallback_told = True
            self.log(finding)

    def _rolled_back(self, result: StepResult) -> bool:
        """Shows the step to the router's guard, and does what it decides; says whether the run went back."""
        router = self.trainer.router
        if router is None or result.expert_tokens is None:
            return False
        health, acted = router.after_step(self.progress.step, result.expert_tokens)
        if health:
            self.log(health)
        if acted is None:
            return False
        if acted.action == "rollback":
            self._roll_back(acted)
            return True
        if acted.action == "reset":
            router.reset(self.trainer.optimizer, self.trainer.gradients.owned)
        self.log(acted)
        if acted.action == "stop":
            raise RouterCollapsed(
                f"step {acted.step}: the router is ill and router.guard says stop: {'; '.join(acted.reasons)}. Lower "
                "train.lr or router.lr_scale, set router.balance, or freeze the router; earlier checkpoints are kept"
            )
        return False

    def _roll_back(self, acted: GuardActed) -> None:
        """To the newest checkpoint up to the last healthy look; the guard remembers what it did."""
        router, ranks, root = self.trainer.router, self.trainer.ranks, self.folder / "checkpoints"
        assert router
        self._finish_save(usual=False)
        ranks.wait()
        found = checkpoint.newest_up_to(root, router.guard.healthy_step)
        assert found, "a run whose guard may roll back begins with a checkpoint"
        remembered, undone = router.guard, self.progress
        then = restore(found.path, trainer=self.trainer, run=self.run)
        router.remember(remembered)
        self.log(replace(acted, resumed_step=then.step))
        skipped = undone.skipped_steps
        if self.run.router.guard.after_rollback == "skip":
            skipped += undone.step - then.step
        self.progress = replace(then, skipped_steps=skipped)
        # What was undone must not be what a restart finds newest, and it must find what the guard remembers.
        if ranks.first:
            checkpoint.discard_after(root, then.step)
        ranks.wait()
        self._save()

    def _evaluate_and_save(self) -> None:
        step, run, trainer = self.progress.step, self.run, self.trainer
        last, every = step == trainer.steps, run.evaluate.every_steps if run.evaluate else None
        evaluated = None
        if trainer.held_out and (last or (every and step % every == 0)):
            evaluated = self._evaluate()
        best = evaluated is not None and (self.progress.best_loss is None or evaluated.loss < self.progress.best_loss)
        if evaluated is not None and best:
            self.progress = replace(self.progress, best_loss=evaluated.loss, best_step=step)
        at_gate = self.gate.stands_before(step, step_s=self.recent_step_s[-1])
        if last:
            self._finish()
        if last or best or at_gate or step % run.train.save_every_steps == 0:
            self._save()
        if at_gate:
            self._finish_save(usual=False)  # the gate must know how long a whole one takes
        if at_gate and self._is_hopeless():
            self.stop.reason = GATE

    def _evaluate(self) -> Evaluated | None:
        """Held-out loss now; the greedy answers only before the first and after the last step, since they are slow.

        None when the run was asked to stop meanwhile.
        """
        trainer, asked, step = self.trainer, self.run.evaluate, self.progress.step
        assert asked and trainer.held_out
        done = evaluate(
            trainer.model,
            trainer.head,
            trainer.tokenizer,
            trainer.held_out,
            step=step,
            questions=trainer.questions if step in (0, trainer.steps) else [],
            max_new_tokens=asked.max_new_tokens,
            loss_chunk_tokens=self.run.train.loss_chunk_tokens,
            device=trainer.device,
            ranks=trainer.ranks,
            stopping=self.stop.poll_alone,
        )
        if done is None:
            return None
        self.stop.deadline.evaluation_took(done.seconds)
        self.log(done)
        self.say(evaluation_line(done, before=self.before))
        self._track({"held_out_loss": done.loss}, step=step)
        return done

    def _finish(self) -> None:
        write_output(self.run, self.trainer)
        router = self.trainer.router
        if router and self.run.adapter and (silent := router.silent_experts()):
            self.log(Finding(severity="warning", text=never_routed_text(silent)))

    def _save(self) -> None:
        """Copies the state, and has the copy written. Waits for an earlier save, and in the foreground for this one."""
        self._finish_save()
        began, root, run, trainer = time.perf_counter(), self.folder / "checkpoints", self.run, self.trainer
        progress = replace(self.progress, proof=take_proof(trainer, run, self.progress))
        best = root / f"step-{progress.best_step:08d}" if progress.best_step is not None else None
        spare = [best] if best else []
        if trainer.router and "rollback" in run.router.guard.action:
            healthy = checkpoint.newest_up_to(root, trainer.router.guard.healthy_step)
            spare += [healthy.path] if healthy else []
        self.saving = Saving(
            root,
            step=progress.step,
            write=take_state(self.host, trainer=trainer, run=run, progress=progress),
            then=lambda: checkpoint.prune(root, keep=run.train.keep_checkpoints, spare=spare),
            ranks=trainer.ranks,
            began=began,
        )
        self.saved_step, self.stop.deadline.saving = progress.step, True
        if not run.train.save_in_background:
            self._finish_save()

    def _note_save(self) -> None:
        """Takes note of the save under way where it is complete. Raises CheckpointError where the disk refused it."""
        if self.saving and (found := self.saving.poll()):
            self._saved(self.saving, found, usual_stall_s=self.saving.stall_s)

    def _finish_save(self, *, usual: bool = True) -> None:
        """The same, and waits for it; `usual`: further saves will be waited for in this way."""
        if saving := self.saving:
            found = saving.wait()
            self._saved(saving, found, usual_stall_s=saving.stall_s if usual else saving.copy_s)

    def _saved(self, saving: Saving, saved: checkpoint.Checkpoint, *, usual_stall_s: float) -> None:
        seconds = saving.copy_s + saving.write_s
        self.saving, self.stop.deadline.saving = None, False
        self.stop.deadline.save_took(seconds, stall_s=usual_stall_s)
        best, stall_s = saved.step == self.progress.best_step, saving.stall_s
        path = str(saved.path)
        self.log(Saved(step=saved.step, path=path, bytes=saved.bytes, seconds=seconds, best=best, stall_s=stall_s))

    def _is_hopeless(self) -> bool:
        """Asks the gate of the first rank, just after a save, so that one has been measured."""
        checked = self.trainer.ranks.tell(self.gate.ask(self.progress.step))
        self.log(checked)
        if finding := self.gate.sparse_saves(checked):
            self.log(finding)
        return checked.hopeless

    def _track(self, values: dict[str, float], *, step: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step)
