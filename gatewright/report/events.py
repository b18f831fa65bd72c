"""The lines of events.jsonl that count: typed, in order, without those that a restart made void."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from gatewright.spec.event import EVENT_VERSION, KINDS, Evaluated, Event, Saved, Start, StepDone

_READERS: dict[str, TypeAdapter[Event]] = {kind: TypeAdapter(type_) for kind, type_ in KINDS.items()}
_FIELDS = {kind: {field.name for field in fields(type_)} for kind, type_ in KINDS.items()}
_FLOATS = {kind: {field.name for field in fields(type_) if field.type is float} for kind, type_ in KINDS.items()}
_ENVELOPE = {"v", "time", "kind"}
_NO_LIMIT = 2**63
_NOTHING_COUNTS = -1


@dataclass(frozen=True, slots=True)
class Line:
    """One event and what surrounds it."""

    event: Event
    time: str
    process: int
    """0 before the first start event, then one more at each."""
    void: bool
    """A later process began from an earlier step, so this event belongs to no state of the run."""


def read_events(path: Path, *, unread: Counter[str]) -> Iterator[Line]:
    """Yields the events of the file, one line in memory at a time; counts in `unread` what it could not use.

    The file is read twice. The first reading only looks for start events, because whether a step counts is
    known when a later process has said from which step it went on. An event written meanwhile is left out.
    """
    last_steps, end = _last_step_of_each_process(path)
    process = 0
    with path.open("rb") as file:
        for raw in _lines(file, end=end):
            found = _parse(raw, unread=unread)
            if found is None:
                continue
            event, time = found
            process += isinstance(event, Start)
            yield Line(event, time, process, _is_void(event, last_step=last_steps[process]))


def _last_step_of_each_process(path: Path) -> tuple[list[int], int]:
    """Last step of each process that no later one did again, and the length of the file in bytes."""
    resumed: list[int] = []
    end = 0
    with path.open("rb") as file:
        for raw in file:
            end += len(raw)
            if b'"start"' not in raw:
                continue
            found = _parse(raw, unread=Counter())
            if found is not None and isinstance(found[0], Start):
                step = found[0].resumed_step
                resumed.append(_NOTHING_COUNTS if step is None else step)
    limits = [_NO_LIMIT]
    for step in reversed(resumed):
        limits.append(min(limits[-1], step))
    return limits[::-1], end


def _is_void(event: Event, *, last_step: int) -> bool:
    if isinstance(event, StepDone | Evaluated | Saved):
        return event.step > last_step
    return last_step == _NOTHING_COUNTS


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
    """The line's JSON object. A process that was killed in mid-line leaves half an event, which the next
    process's first event may follow on the same line: the whole one is kept."""
    row = _decoded(raw)
    if row is None:
        unread["broken line"] += 1
        whole = raw.rfind(b'{"v"')
        row = _decoded(raw[whole:]) if whole > 0 else None
    elif not isinstance(row, dict):
        unread["line that is no JSON object"] += 1
    return row if isinstance(row, dict) else None


def _decoded(raw: bytes) -> Any:
    try:
        return from_json(raw)
    except ValueError:
        return None
