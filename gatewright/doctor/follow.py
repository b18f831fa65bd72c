"""Watching a log that is being written: a new diagnosis whenever what it says has changed."""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gatewright.doctor.diagnosis import Diagnosis, judge
from gatewright.doctor.health import silence
from gatewright.doctor.scan import Scanner
from gatewright.doctor.source import CHUNK_BYTES, LogError
from gatewright.spec.plan import Knob, MemoryEstimate
from gatewright.spec.run import Run

_SILENT = " silent"


def follow(
    path: Path,
    *,
    every_s: float = 5.0,
    patience_s: float = 0.0,
    run: Run | None = None,
    planned: MemoryEstimate | None = None,
    knobs: Sequence[Knob] = (),
) -> Iterator[Diagnosis]:
    """Yields a diagnosis of what was written so far, another one whenever its findings change, and one when a run that
    works falls silent.

    Waits for a file that is not there yet. Starts over where the file became shorter (a requeued job that truncates).
    Ends after `patience_s` seconds without a new byte; 0: never. Raises LogError where the path is a folder.
    """
    if path.is_dir():
        raise LogError(f"{path} is a folder; --follow wants one log")
    scanner, at, shown = Scanner(str(path)), 0, ""
    diagnosis: Diagnosis | None = None
    quiet_since = time.monotonic()
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < at:
            scanner, at = Scanner(str(path)), 0
        if size > at:
            at += _feed(scanner, path, at)
            quiet_since = time.monotonic()
            diagnosis = judge([copy.deepcopy(scanner).finish()], run=run, planned=planned, knobs=knobs)
            if (state := _state(diagnosis)) != shown:
                shown = state
                yield diagnosis
        quiet_s = time.monotonic() - quiet_since
        if patience_s and quiet_s > patience_s:
            return
        works = diagnosis is not None and diagnosis.verdict == "healthy" and not shown.endswith(_SILENT)
        if diagnosis and works and (silent := silence(diagnosis.progress, quiet_s=quiet_s, file=str(path))):
            shown += _SILENT
            yield replace(diagnosis, health=(silent, *diagnosis.health))
        time.sleep(every_s)


def _feed(scanner: Scanner, path: Path, start: int) -> int:
    """Hands over what was added since; returns how many bytes."""
    added = 0
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(CHUNK_BYTES):
            scanner.feed(chunk)
            added += len(chunk)
    return added


def _state(diagnosis: Diagnosis) -> str:
    """What a watcher is told of: the verdict and the codes, not the numbers that move with every step."""
    return " ".join([diagnosis.verdict, *(finding.code for finding in diagnosis.findings)])
