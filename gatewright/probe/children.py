"""Each measurement in a process of its own, with a time-out: a call into a driver may hang, and its caller with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import Any

from gatewright.spec.errors import UserError
from gatewright.spec.probe import (
    Allocator,
    AttentionKernel,
    Cache,
    Costs,
    Device,
    DeviceState,
    Disk,
    FourBit,
    Groups,
    Machine,
    Outcome,
    Probe,
    Shm,
    Status,
    Versions,
    record,
)

KILL_S = 5.0
"""Seconds that a killed process gets to be gone; one that is stuck in the kernel is left behind."""
SHOWN = 300
"""Characters of an error that are shown."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One name of `--only`."""

    name: str
    field: str
    """Of Probe."""
    kind: Any
    timeout_s: float
    """Loading torch from a shared file system takes a minute by itself."""


MEASUREMENTS = (
    Measurement("machine", "machine", Machine, 30),
    Measurement("versions", "versions", Versions, 180),
    Measurement("devices", "devices", list[Device], 180),
    Measurement("driver", "states", list[DeviceState], 60),
    Measurement("attention", "attention", list[AttentionKernel], 300),
    Measurement("costs", "costs", Costs, 300),
    Measurement("allocator", "allocator", Allocator, 180),
    Measurement("four_bit", "four_bit", FourBit, 180),
    Measurement("groups", "groups", Groups, 240),
    Measurement("disk", "disk", Disk, 180),
    Measurement("shm", "shm", Shm, 30),
    Measurement("caches", "caches", list[Cache], 60),
)
NAMES = tuple(item.name for item in MEASUREMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the measurements look at, besides the machine."""

    model: str | None = None
    """Folder of a model, for the sizes of its heads."""
    folder: str = "."
    """Where the run's checkpoints will be written."""
    write_bytes: int = 256 * 2**20
    """Written to measure the disk."""


def probe(
    wanted: Wanted,
    *,
    only: Sequence[str] = (),
    timeout_s: float | None = None,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> Probe:
    """Measures this machine. `timeout_s` replaces the time-out of each measurement; `tell` hears of each that ends."""
    values: dict[str, Any] = {}
    outcomes: list[Outcome] = []
    for item in chosen(only):
        outcome, value = measure(item, wanted, timeout_s=timeout_s or item.timeout_s)
        if value is not None:
            values[item.field] = value
        outcomes.append(outcome)
        tell(outcome)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Probe(time=now, host=gethostname(), outcomes=outcomes, **values)


def chosen(only: Sequence[str]) -> Iterable[Measurement]:
    """The measurements of these names, all where none is given. Raises UserError for one that does not exist."""
    for name in only:
        if name not in NAMES:
            raise UserError(f"No measurement is called {name[:40]!r}. Known: {', '.join(NAMES)}.")
    return [item for item in MEASUREMENTS if not only or item.name in only]


def measure(item: Measurement, wanted: Wanted, *, timeout_s: float) -> tuple[Outcome, Any]:
    """How the measurement ended, and its record if it was made."""
    with tempfile.TemporaryDirectory(prefix="gatewright-probe-") as place:
        answer, errors = Path(place) / "answer.json", Path(place) / "stderr"
        began = time.monotonic()
        ended = run_child(
            [sys.executable, "-m", "gatewright.probe.child", item.name, str(answer), json.dumps(asdict(wanted))],
            errors=errors,
            timeout_s=timeout_s,
        )
        seconds = time.monotonic() - began
        status, text, value = read_answer(ended, answer, errors, timeout_s=timeout_s)
    if value is not None:
        value = record(item.kind, value, what=f"probe {item.name}")
    return Outcome(name=item.name, status=status, text=text[:SHOWN], seconds=round(seconds, 2)), value


def run_child(command: Sequence[str], *, errors: Path, timeout_s: float) -> int | None:
    """Exit code of the process; None where it ran out of time and was killed, with all that it had started."""
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(child)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the child's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: to wait on would hang us too
        child.wait(KILL_S)


def read_answer(ended: int | None, answer: Path, errors: Path, *, timeout_s: float) -> tuple[Status, str, Any]:
    if ended is None:
        last = last_line(errors)
        return "hung", f"no answer within {timeout_s:g} s, killed" + (f"; its last words: {last}" if last else ""), None
    if ended == 0 and answer.is_file():
        said = json.loads(answer.read_bytes())
        return said["status"], said["text"], said["value"]
    how = f"died by {signal.Signals(-ended).name}" if ended < 0 else f"ended with exit code {ended}"
    return "failed", f"{how}: {last_line(errors) or 'it said nothing'}", None


def last_line(errors: Path) -> str:
    lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
