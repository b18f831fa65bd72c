"""The gate: early in each link, and at a tenth of the run, its end is predicted and compared with the time it has."""

import math
import statistics
import time

from gatewright.spec.event import Finding, GateChecked
from gatewright.spec.run import Run
from gatewright.train.deadline import Deadline

WARM_UP_STEPS = 5
"""First steps of a process: kernels are compiled and tuned in them."""
LATER = 0.1
"""Share of the run at which the gate is asked again."""


class GateKeeper:
    """Keeps the times of this process's steps; is asked after its gate.step-th one, and at a tenth of the run."""

    def __init__(self, run: Run, deadline: Deadline, *, steps: int) -> None:
        self.run, self.deadline, self.steps = run, deadline, steps
        self.step = run.cluster.gate.step if run.cluster else 0
        self.times_s: list[float] = []
        self.startup_s = 0.0

    def stands_before(self, step: int, *, step_s: float) -> bool:
        """Takes the time of a step that was done; whether the gate is to be asked now."""
        if not self.times_s:
            self.startup_s = time.time() - step_s - self.deadline.started
        self.times_s.append(step_s)
        if self.step == 0 or self.deadline.links_left is None or step >= self.steps:
            return False
        return len(self.times_s) == self.step or (
            step == math.ceil(LATER * self.steps) and len(self.times_s) > self.step
        )

    def ask(self, step: int) -> GateChecked:
        """The prediction, from the median of this process's steps after the first five, and measured evaluations and
        saves; the time is this link's rest, and what further links have between their start and their last save."""
        run, deadline, left = self.run, self.deadline, self.steps - step
        settled = self.times_s[WARM_UP_STEPS:] or self.times_s
        step_s = statistics.median(settled[-max(20, self.step) :])
        evaluations = left // run.evaluate.every_steps if run.evaluate and run.evaluate.every_steps else 0
        evaluations += 1 if run.evaluate else 0
        saves = math.ceil(left / run.train.save_every_steps)
        evaluate_s, save_s = deadline.evaluate_s or 0.0, deadline.stall_s
        last_s = deadline.save_s or 0.0  # nothing is left to do beside the last save
        needed_s = left * step_s + evaluations * evaluate_s + max(0, saves - 1) * save_s + last_s
        link_s = max(0.0, deadline.link_s - self.startup_s - deadline.lead_s)
        links = deadline.links_left or 0
        left_s = max(0.0, deadline.end - time.time() - deadline.lead_s) + links * link_s
        return GateChecked(
            step=step,
            steps=self.steps,
            step_s=step_s,
            evaluate_s=evaluate_s,
            save_s=save_s,
            needed_s=needed_s,
            left_s=left_s,
            link_s=link_s,
            hopeless=needed_s > left_s,
        )

    def sparse_saves(self, checked: GateChecked) -> Finding | None:
        """A fault in a link without a save in its first half loses more than half of it."""
        fitting = checked.link_s / checked.step_s
        every = self.run.train.save_every_steps
        if not self.deadline.links_left or every <= fitting / 2:
            return None
        text = (
            f"train.save_every_steps = {every}, and a link makes {fitting:,.0f} steps of {checked.step_s:.3g} s: a "
            f"fault may cost more than half of it; {max(1, int(fitting / 2)):,} or less would be safer"
        )
        return Finding(severity="warning", text=text)
