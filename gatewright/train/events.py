"""events.jsonl: every event of the run, one JSON line each, appended and flushed."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from gatewright.spec.event import EVENT_VERSION, KINDS, Event

_KIND_OF = {cls: kind for kind, cls in KINDS.items()}


class EventLog:
    """Appends events to a file. A line that a kill left unfinished is closed first, so that it spoils no other."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        if self._file.tell():
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    self._file.write(b"\n")

    def write(self, event: Event) -> None:
        """Writes one line and hands it to the operating system, so a killed process loses nothing it reported."""
        head = {
            "v": EVENT_VERSION,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "kind": _KIND_OF[type(event)],
        }
        self._file.write(json.dumps(head | asdict(event), ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
