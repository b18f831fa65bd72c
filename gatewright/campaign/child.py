"""The work of a link as a child process: watched, told of its end by a file and by signals, and never left behind."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

POLL_S = 0.1
TERM_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Signals:
    """The first of SIGUSR1, SIGTERM and SIGINT that this process was sent; listens from its creation on."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)


@dataclass(slots=True)
class Deadline:
    """When the child must be gone; the queue may move it while it runs."""

    time: float
    lead_s: float
    """So long before it the child is asked to stop, if it has not done so by itself."""


def supervise(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stop_file: Path,
    signals: Signals,
    deadline: Deadline,
    hand_on: Callable[[], signal.Signals | None],
    tick: Callable[[], None],
) -> tuple[int, str]:
    """Runs the command to its end: its exit code (negative: the signal that killed it), and why it was asked to stop.

    Asked to stop, by a signal or by time, it finds `stop_file`. A signal is handed on as the one that `hand_on` names,
    once it names one. At the deadline the child gets SIGTERM, two seconds later SIGKILL. `tick` is called some times a
    second.
    """
    child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with)
    asked, handed_on, termed_at = "", False, 0.0
    try:
        while True:
            try:
                return child.wait(timeout=POLL_S), asked
            except subprocess.TimeoutExpired:
                pass
            tick()
            now = time.time()
            if not asked and (asked := _reason(signals, deadline, now)):
                stop_file.parent.mkdir(parents=True, exist_ok=True)
                stop_file.write_text(f"{asked}\n", encoding="utf-8")
            if signals.first and not handed_on and (number := hand_on()):
                _send(child, number)
                handed_on = True
            if not termed_at and now >= deadline.time:
                _send(child, signal.SIGTERM)
                termed_at = now
            if termed_at and now >= termed_at + TERM_GRACE_S:
                _send(child, signal.SIGKILL)
    finally:
        if child.poll() is None:
            _send(child, signal.SIGKILL)
            child.wait()


def _reason(signals: Signals, deadline: Deadline, now: float) -> str:
    if signals.first:
        return f"signal {signals.first.name}"
    return "the time limit is near" if now >= deadline.time - deadline.lead_s else ""


def _send(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _die_with() -> None:
    """In the child: asks the kernel for SIGTERM when the parent dies, so that a killed link leaves nothing behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
