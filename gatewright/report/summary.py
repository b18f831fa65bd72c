"""The Report: one run folder reduced to the numbers that the text and the page show."""

import math
from dataclasses import dataclass
from datetime import datetime

from gatewright.report.loads import Loads
from gatewright.report.series import Series
from gatewright.spec.event import (
    DataLoaded,
    Evaluated,
    Finding,
    GateChecked,
    GuardActed,
    LayoutChosen,
    ModelLoaded,
    ResumeProved,
    RouterHealth,
    Saved,
    Start,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What was measured at every step, reduced for drawing."""

    loss: Series
    lr: Series
    grad_norm: Series
    tokens_per_s: Series
    memory_bytes: Series
    busiest: Series
    """Largest load of any expert in any layer; empty for a dense model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the steps that count."""

    steps: int
    tokens: int
    target_tokens: int
    micro_batches: int
    dropped_tokens: int
    peak_memory_bytes: int
    median_tokens_per_s: float
    median_step_s: float
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    ranks: int = 1
    """Of the last step."""
    median_mfu: float | None = None
    """None where no step says it."""
    median_spread: float | None = None
    worst_spread: float | None = None
    """Slowest rank's own work over the median, of steps on many ranks."""
    mean_wait_share: float | None = None
    """Part of a step that a rank spent in collectives, over all ranks and steps."""
    rank_memory_bytes: tuple[int, ...] = ()
    """Peak of each rank of the last step; empty for one process."""
    rank_reserved_bytes: tuple[int, ...] = ()

    @property
    def other_s(self) -> float:
        """Step time in none of the measured phases."""
        return max(0.0, self.step_s - self.data_s - self.forward_s - self.backward_s - self.optimizer_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One held-out row, answered before and after training; None where it was not asked."""

    prompt: str
    expected: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    run: str
    folder: str
    state: str
    """finished, interrupted, hopeless or failed as the run said; running; silent: no event for long, and no word of a
    stop."""
    detail: str
    """What the stop event adds."""
    steps_done: int
    steps_planned: int
    """0 if no process got as far as saying it."""
    elapsed_s: float
    """Time in which a process worked on the run: gaps between processes left out, void steps included."""
    last_event: datetime | None
    read_at: datetime
    start: Start | None
    """Of the last process."""
    processes: int
    layout: LayoutChosen | None
    """Of the last process on many ranks."""
    model: ModelLoaded | None
    data: tuple[DataLoaded, ...]
    """One a split, train first."""
    curves: Curves
    totals: Totals
    evaluations: tuple[Evaluated, ...]
    """By step."""
    saves: tuple[Saved, ...]
    """By step."""
    findings: tuple[Finding, ...]
    """Errors, then warnings, then notes; the same sentence once."""
    restarts: tuple[int, ...]
    """Last step kept at each restart, 0 where the run began anew."""
    void_steps: int
    """Steps that a later process did again."""
    void_s: float
    """Time in them."""
    loads: Loads | None
    looks: tuple[RouterHealth, ...]
    """The router on its probe batch, by step; empty for a dense model."""
    guard: tuple[GuardActed, ...]
    """What the router's guard decided, in order."""
    resumes: tuple[ResumeProved, ...]
    """What each process that went on from a checkpoint found again, in order; void ones too."""
    gate: GateChecked | None
    """The last prediction of the run's end."""
    missing_steps: int
    """Steps up to the last one that no process reported."""
    unread: dict[str, int]
    """What in events.jsonl could not be used, in words, and how often."""
    run_file: str | None
    """Text of run.yaml."""

    @property
    def before(self) -> Evaluated | None:
        """The first evaluation."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def after(self) -> Evaluated | None:
        """The last evaluation, if there are two."""
        return self.evaluations[-1] if len(self.evaluations) > 1 else None

    @property
    def exact_match(self) -> list[Evaluated]:
        """Evaluations in which rows were answered."""
        return [evaluation for evaluation in self.evaluations if evaluation.asked]

    @property
    def answers(self) -> list[Answer]:
        """The sampled rows of the first and the last evaluation that have any, paired by their prompt."""
        sampled = [evaluation for evaluation in self.evaluations if evaluation.samples]
        if not sampled:
            return []
        before = {row.get("prompt", ""): row for row in sampled[0].samples}
        after = {row.get("prompt", ""): row for row in sampled[-1].samples} if len(sampled) > 1 else {}
        return [
            Answer(
                prompt=prompt,
                expected=(after.get(prompt) or before[prompt]).get("expected", ""),
                before=before[prompt].get("answer", "") if prompt in before else None,
                after=after[prompt].get("answer", "") if prompt in after else None,
            )
            for prompt in {**before, **after}
        ]

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the lowest held-out loss; each was the best when it was saved."""
        return max((save.step for save in self.saves if save.best), default=None)

    @property
    def remaining_s(self) -> float:
        """Time that the steps still to do take at the median pace; NaN if unknown."""
        return max(0, self.steps_planned - self.steps_done) * self.totals.median_step_s


def wilson_interval(correct: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share, by E. B. Wilson, "Probable inference", JASA 22 (1927)."""
    z = 1.959964
    share = correct / asked
    centre = share + z * z / (2 * asked)
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    scale = 1 + z * z / asked
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
