"""How far a run has come, read from the end of its events.jsonl; cheap enough to ask of hundreds of runs."""

import json
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

TAIL_BYTES, GLANCE_BYTES = 2**20, 2**14
"""How much of the end of the file is read: for a judgement, and for a table of many runs."""
HEAD_BYTES = 2**15
WARM_UP_STEPS = 5
"""Steps of a process that compile and tune; no estimate rests on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The newest facts of a run; steps of 0 where it has not begun."""

    step: int = 0
    steps: int = 0
    step_s: float | None = None
    """Median of the last steps."""
    loss: float | None = None
    saved_step: int | None = None
    save_s: float | None = None
    save_bytes: int | None = None
    evaluate_s: float | None = None
    event_time: float | None = None
    """Unix seconds of the newest event."""
    stop_reason: str | None = None
    """How the last process said it ended; None while one works, or where it was killed."""
    stop_detail: str = ""
    gate: dict[str, Any] | None = None
    """The newest GateChecked."""
    guard: dict[str, Any] | None = None
    """The newest GuardActed."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def remaining_s(self) -> float | None:
        return None if self.step_s is None or not self.steps else (self.steps - self.step) * self.step_s


def glance(run_folder: Path) -> RunProgress:
    """Progress by the last few events, or by more of them where those hold no step."""
    seen = read_progress(run_folder, tail_bytes=GLANCE_BYTES)
    return seen if seen.step and seen.step_s else read_progress(run_folder)


def read_progress(run_folder: Path, *, since: float = 0.0, tail_bytes: int = TAIL_BYTES) -> RunProgress:
    """Progress by the events that are not older than `since` (Unix seconds); an empty one where there are none."""
    facts: dict[str, Any] = {}
    recent: list[float] = []
    warnings: list[str] = []
    for event in _events(run_folder / "events.jsonl", tail_bytes=tail_bytes):
        when = event_time(event)
        if when is None or when < since:
            continue
        facts["event_time"] = when
        match event.get("kind"):
            case "start":
                facts |= {"steps": event.get("steps", 0), "stop_reason": None, "stop_detail": ""}
                facts["step"] = event.get("resumed_step") or 0
                recent.clear()
            case "step":
                facts |= {"step": event.get("step", 0), "loss": event.get("loss"), "stop_reason": None}
                recent.append(event.get("step_s", 0.0))
            case "save":
                facts |= {"saved_step": event.get("step"), "save_bytes": event.get("bytes")}
                facts["save_s"] = max(event.get("seconds", 0.0), facts.get("save_s", 0.0))
            case "evaluate":
                facts["evaluate_s"] = event.get("seconds")
            case "gate":
                facts["gate"] = event
            case "guard":
                facts["guard"] = event
            case "finding" if event.get("severity") == "warning":
                warnings.append(str(event.get("text", "")))
            case "stop":
                facts |= {"stop_reason": event.get("reason"), "stop_detail": event.get("detail", "")}
    settled = recent[WARM_UP_STEPS:] or recent
    if not facts.get("steps"):
        facts["steps"] = _steps_of(run_folder)
    return RunProgress(
        **facts, step_s=statistics.median(settled[-50:]) if settled else None, warnings=tuple(dict.fromkeys(warnings))
    )


def event_time(event: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def _events(path: Path, *, tail_bytes: int) -> Iterator[dict[str, Any]]:
    """The events in the last part of the file; a line that a kill cut off is passed over."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return
    yield from _parsed(lines[1:] if size > tail_bytes else lines)


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith(b"{"):
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _steps_of(run_folder: Path) -> int:
    """Steps of the whole run, where the start lies before the part that was read: by the first start event."""
    try:
        with (run_folder / "events.jsonl").open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return 0
    starts = _parsed(line for line in head.split(b"\n") if b'"kind": "start"' in line[:120])
    return int(next(starts, {}).get("steps", 0))
