"""The lines of events.jsonl that count: typed, in order, without those that a restart made void."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from gatewright.spec.event import (
    EVENT_VERSION,
    KINDS,
    Evaluated,
    Event,
    GuardActed,
    RouterHealth,
    Saved,
    Start,
    StepDone,
)

_READERS: dict[str, TypeAdapter[Event]] = {kind: TypeAdapter(type_) for kind, type_ in KINDS.items()}
_FIELDS = {kind: {field.name for field in fields(type_)} for kind, type_ in KINDS.items()}
_FLOATS = {kind: {field.name for field in fields(type_) if field.type is float} for kind, type_ in KINDS.items()}
_ENVELOPE = {"v", "time", "kind"}
_NO_LIMIT = 2**63
_NO_STEP = -1  # less than the evaluation before training, at step 0


@dataclass(frozen=True, slots=True)
class Line:
    """One event, when it was written, and whether it still holds."""

    event: Event
    time: str
    void: bool
    """A later process went on from an earlier step, so this step, evaluation or save is of no state of the run."""


def read_events(path: Path, *, unread: Counter[str]) -> Iterator[Line]:
    """Yields the events of the file, one line in memory at a time; counts in `unread` what it could not use.

    The file is read twice. The first reading only looks for what goes back to an earlier step, a new process or the
    guard, because whether a step counts is known only then. An event written meanwhile is left out.
    """
    last_steps, end = _last_step_after_each_start(path)
    starts = 0
    with path.open("rb") as file:
        for raw in _lines(file, end=end):
            found = _parse(raw, unread=unread)
            if found is None:
                continue
            event, time = found
            starts += _goes_back(event)
            void = isinstance(event, StepDone | Evaluated | Saved | RouterHealth) and event.step > last_steps[starts]
            yield Line(event, time, void)


def _last_step_after_each_start(path: Path) -> tuple[list[int], int]:
    """Last step not done again later, after 0, 1, 2, … events that went back; and the file's length in bytes."""
    resumed: list[int] = []
    end = 0
    with path.open("rb") as file:
        for raw in file:
            end += len(raw)
            if b'"start"' not in raw and b'"guard"' not in raw:
                continue
            found = _parse(raw, unread=Counter())
            if found is not None and _goes_back(found[0]):
                step = found[0].resumed_step
                resumed.append(_NO_STEP if step is None else step)
    limits = [_NO_LIMIT]
    for step in reversed(resumed):
        limits.append(min(limits[-1], step))
    return limits[::-1], end


def _goes_back(event: Event) -> TypeGuard[Start | GuardActed]:
    """Whether what comes after this event goes on from an earlier step: a new process, or a guard's rollback."""
    return isinstance(event, Start) or (isinstance(event, GuardActed) and event.resumed_step is not None)


def _lines(file: BinaryIO, *, end: int) -> Iterator[bytes]:
    for raw in file:
        end -= len(raw)
        if end < 0:
            return
        if raw.strip():
            yield raw


def _parse(raw: bytes, *, unread: Counter[str]) -> tuple[Event, str] | None:
    row = _object(raw, unread=unread)
    if row is None:
        return None
    kind = row.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        unread[f"unknown kind {kind!r:.40}"] += 1
        return None
    if row.get("v") != EVENT_VERSION:
        unread[f"event of format {row.get('v')!r:.20}, known is {EVENT_VERSION}"] += 1
    for name in row.keys() - _FIELDS[kind] - _ENVELOPE:
        unread[f"unknown field {name!r:.40} of {kind}"] += 1
    for name in _FLOATS[kind]:  # NaN and infinity are null in strict JSON
        if name in row and row[name] is None:
            row[name] = math.nan
    try:
        return _READERS[kind].validate_python(row), str(row.get("time", ""))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        unread[f"{kind} event with {where}: {first['msg']}"[:160]] += 1
        return None


def _object(raw: bytes, *, unread: Counter[str]) -> dict[str, Any] | None:
    try:
        row = from_json(raw)
    except ValueError:  # a process that was killed in mid-line
        unread["broken line"] += 1
        return None
    if isinstance(row, dict):
        return row
    unread["line that is no JSON object"] += 1
    return None
