"""Reads a run folder into a Report, whatever state the run is in."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gatewright.report.events import Line, read_events
from gatewright.report.loads import LoadsInTime, busiest
from gatewright.report.processes import Processes
from gatewright.report.series import median, reduce
from gatewright.report.summary import Curves, Report, Totals
from gatewright.spec.errors import UserError
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
    StepDone,
)

_SEVERITIES = ("error", "warning", "note")
_SILENT_AFTER_S = 300.0
_SILENT_AFTER_STEPS = 20


def read_run_folder(folder: Path, *, now: datetime | None = None) -> Report:
    """The report of the run in `folder`; `now` decides whether a run without a stop still works (default: the clock).

    Memory: some 110 bytes a step, and the counts of 128 windows of time.
    Raises UserError if the folder holds no readable events.jsonl.
    """
    path = folder / "events.jsonl"
    if not path.is_file():
        raise UserError(_no_events(folder))
    unread: Counter[str] = Counter()
    reading = _Reading()
    try:
        for line in read_events(path, unread=unread):
            reading.take(line)
        run_file = folder / "run.yaml"
        text = run_file.read_text(encoding="utf-8", errors="replace") if run_file.is_file() else None
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    return reading.finish(folder, unread=unread, run_file=text, now=now or datetime.now(UTC))


class _Columns:
    """The numbers of every step that counts, 8 bytes each."""

    def __init__(self) -> None:
        self.step, self.tokens, self.memory_bytes = array("q"), array("q"), array("q")
        self.loss, self.lr, self.grad_norm = array("d"), array("d"), array("d")
        self.step_s, self.busiest = array("d"), array("d")
        self.mfu, self.spread, self.wait_share = array("d"), array("d"), array("d")
        self.ranks = 1
        self.rank_memory_bytes: list[int] = []
        self.rank_reserved_bytes: list[int] = []
        self.target_tokens = self.micro_batches = self.dropped_tokens = 0
        self.data_s = self.forward_s = self.backward_s = self.optimizer_s = 0.0

    def add(self, event: StepDone) -> None:
        self.step.append(event.step)
        self.tokens.append(event.tokens)
        self.memory_bytes.append(event.memory_bytes)
        self.loss.append(event.loss)
        self.lr.append(event.lr)
        self.grad_norm.append(event.grad_norm)
        self.step_s.append(event.step_s)
        self.busiest.append(busiest(event.expert_tokens))
        self.target_tokens += event.target_tokens
        self.micro_batches += event.micro_batches
        self.dropped_tokens += event.dropped_tokens
        self.data_s += event.data_s
        self.forward_s += event.forward_s
        self.backward_s += event.backward_s
        self.optimizer_s += event.optimizer_s
        if event.mfu is not None:
            self.mfu.append(event.mfu)
        if event.rank_wait_s:
            self._add_ranks(event)

    def _add_ranks(self, event: StepDone) -> None:
        self.ranks = len(event.rank_step_s)
        self.rank_memory_bytes, self.rank_reserved_bytes = event.rank_memory_bytes, event.rank_reserved_bytes
        if event.spread is not None:
            self.spread.append(event.spread)
        pairs = zip(event.rank_wait_s, event.rank_step_s, strict=True)
        self.wait_share.extend(wait_s / step_s for wait_s, step_s in pairs if step_s > 0)

    def tokens_per_s(self) -> Sequence[float]:
        pairs = zip(self.tokens, self.step_s, strict=True)
        return array("d", (tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs))

    def curves(self, *, routed: bool) -> Curves:
        return Curves(
            loss=reduce(self.step, self.loss),
            lr=reduce(self.step, self.lr),
            grad_norm=reduce(self.step, self.grad_norm),
            tokens_per_s=reduce(self.step, self.tokens_per_s()),
            memory_bytes=reduce(self.step, self.memory_bytes),
            busiest=reduce(self.step, self.busiest) if routed else reduce((), ()),
        )

    def totals(self) -> Totals:
        return Totals(
            steps=len(self.step),
            tokens=sum(self.tokens),
            target_tokens=self.target_tokens,
            micro_batches=self.micro_batches,
            dropped_tokens=self.dropped_tokens,
            peak_memory_bytes=max(self.memory_bytes, default=0),
            median_tokens_per_s=median(self.tokens_per_s()),
            median_step_s=median(self.step_s),
            ranks=self.ranks,
            median_mfu=median(self.mfu) if self.mfu else None,
            median_spread=median(self.spread) if self.spread else None,
            worst_spread=max(self.spread, default=None),
            mean_wait_share=math.fsum(self.wait_share) / len(self.wait_share) if self.wait_share else None,
            rank_memory_bytes=tuple(self.rank_memory_bytes),
            rank_reserved_bytes=tuple(self.rank_reserved_bytes),
            step_s=math.fsum(self.step_s),
            data_s=self.data_s,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            optimizer_s=self.optimizer_s,
        )


class _Reading:
    """What the lines have said so far."""

    def __init__(self) -> None:
        self.columns, self.loads = _Columns(), LoadsInTime()
        self.start: Start | None = None
        self.layout: LayoutChosen | None = None
        self.model: ModelLoaded | None = None
        self.data: dict[str, DataLoaded] = {}
        self.evaluations: dict[int, Evaluated] = {}
        self.saves: dict[int, Saved] = {}
        self.findings: dict[Finding, None] = {}
        self.looks: dict[int, RouterHealth] = {}
        self.guard: list[GuardActed] = []
        self.resumes: list[ResumeProved] = []
        self.gate: GateChecked | None = None
        self.other_shape = 0
        self.processes = Processes()
        self.restarts: list[int] = []
        self.void_steps, self.void_s = 0, 0.0

    def take(self, line: Line) -> None:
        self.processes.take(line)
        if line.void:
            if isinstance(line.event, StepDone):
                self.void_steps += 1
                self.void_s += line.event.step_s
            return
        match line.event:
            case Start() as start:
                self._start(start)
            case LayoutChosen() as layout:
                self.layout = layout
            case ModelLoaded() as model:
                self.model = model
            case DataLoaded() as data:
                self.data[data.split] = data
            case StepDone() as step:
                self._step(step)
            case Evaluated() as evaluated:
                self.evaluations[evaluated.step] = evaluated
            case Saved() as saved:
                self.saves[saved.step] = saved
            case RouterHealth() as look:
                self.looks[look.step] = look
            case GuardActed() as acted:
                self.guard.append(acted)
                if acted.resumed_step is not None:
                    self.restarts.append(acted.resumed_step)
            case Finding() as finding:
                self.findings[finding] = None
            case ResumeProved() as proved:
                self.resumes.append(proved)
            case GateChecked() as gate:
                self.gate = gate

    def _start(self, event: Start) -> None:
        self.start = event
        if event.resumed_step is not None:
            self.restarts.append(event.resumed_step)
        else:
            self.restarts = [0] if self.void_steps else []

    def _step(self, event: StepDone) -> None:
        self.columns.add(event)
        if event.expert_tokens and self.loads.fits(event.expert_tokens):
            self.loads.add(event.step, event.expert_tokens)
        elif event.expert_tokens:
            self.other_shape += 1

    def finish(self, folder: Path, *, unread: Counter[str], run_file: str | None, now: datetime) -> Report:
        if self.other_shape:
            unread["step whose expert_tokens has another shape than the first"] = self.other_shape
        loads = self.loads.finish(self.model.moe_layers if self.model else [])
        return Report(
            run=self.start.run if self.start else folder.resolve().name,
            folder=str(folder),
            state=self._state(now),
            detail=self.processes.stop.detail if self.processes.stop else "",
            steps_done=max(self.columns.step, default=0),
            steps_planned=self.start.steps if self.start else 0,
            elapsed_s=math.fsum(process.seconds for process in self.processes.all),
            last_event=self.processes.last_event,
            read_at=now,
            start=self.start,
            processes=len(self.processes.all),
            layout=self.layout,
            model=self.model,
            data=tuple(sorted(self.data.values(), key=lambda data: data.split != "train")),
            curves=self.columns.curves(routed=loads is not None),
            totals=self.columns.totals(),
            evaluations=tuple(self.evaluations[step] for step in sorted(self.evaluations)),
            saves=tuple(self.saves[step] for step in sorted(self.saves)),
            findings=tuple(sorted(self.findings, key=_severity)),
            restarts=tuple(self.restarts),
            void_steps=self.void_steps,
            void_s=self.void_s,
            loads=loads,
            looks=tuple(self.looks[step] for step in sorted(self.looks)),
            guard=tuple(self.guard),
            resumes=tuple(self.resumes),
            gate=self.gate,
            missing_steps=max(self.columns.step, default=0) - len(set(self.columns.step)),
            unread=dict(unread),
            run_file=run_file,
        )

    def _state(self, now: datetime) -> str:
        if self.processes.stop:
            return self.processes.stop.reason
        longest_s = max(self.columns.step_s[-100:], default=0.0)
        patience_s = max(_SILENT_AFTER_S, _SILENT_AFTER_STEPS * longest_s)
        last_event = self.processes.last_event
        if last_event is None or (now - last_event).total_seconds() > patience_s:
            return "silent"
        return "running"


def _severity(finding: Finding) -> int:
    return _SEVERITIES.index(finding.severity) if finding.severity in _SEVERITIES else len(_SEVERITIES)


def _no_events(folder: Path) -> str:
    looked = f"no run to report in {folder}: looked for events.jsonl there, "
    looked += "which a run writes from its first second on" if folder.is_dir() else "and there is no such folder"
    parent = folder if folder.is_dir() and any(folder.glob("*/events.jsonl")) else folder.parent
    runs = sorted(path.parent for path in parent.glob("*/events.jsonl")) if parent.is_dir() else []
    if not runs:
        return f"{looked}. No run lies in {parent} either; start one with `gatewright train RUN.yaml`"
    shown = ", ".join(str(run) for run in runs[:20]) + (f" and {len(runs) - 20} more" if len(runs) > 20 else "")
    return f"{looked}. Runs in {parent}: {shown}"
