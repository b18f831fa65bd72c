"""Asking a run to stop, by a signal, a file or the clock: it saves and leaves; at a second Ctrl-C it leaves at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import distributed

from gatewright.train.deadline import Deadline

GATE = "it cannot finish in the time it has"
"""Why the gate stops a run."""


class Interrupted(Exception):
    """Raised between two micro-batches: the step is given up, the weights are those of the step before."""


class StopRequest:
    """Whether, and why, the run is to stop. True from the first `poll` that says so on, on every rank alike."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.signal: str | None = None
        self.reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is not None

    def poll(self) -> bool:
        """Looks at signals, the stop file and the clock. With many ranks a collective: all must call it together.

        A signal or file on one rank is enough; of the clocks only that of rank 0 counts.
        """
        if self.reason is None:
            mine = self._urgent() or (self.deadline.near() if _rank() == 0 else None)
            if _any_rank(mine is not None):
                self.reason = mine or "asked on another rank"
        return bool(self)

    def poll_alone(self) -> bool:
        """The same in the middle of an evaluation, for signals and the file; with many ranks it waits for `poll`."""
        if self.reason is None and _ranks() == 1:
            self.reason = self._urgent()
        return bool(self)

    def in_step(self) -> None:
        """Between two micro-batches. Raises Interrupted."""
        if self.poll_alone():
            raise Interrupted

    def _urgent(self) -> str | None:
        return self.signal or self.deadline.asked()


@contextmanager
def listen(announce: str, *, say: object = print, deadline: Deadline | None = None) -> Iterator[StopRequest]:
    """Turns signals into a StopRequest inside the block; a second SIGINT raises KeyboardInterrupt at once."""
    request = StopRequest(deadline or Deadline())

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not request.signal and callable(say):
            say(announce)
        request.signal = request.signal or signal.Signals(number).name

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            # a late SIGUSR1 must not end a process that has saved and is leaving
            late = number == signal.SIGUSR1 and handler == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if late else handler)


def _ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _rank() -> int:
    return distributed.get_rank() if _ranks() > 1 else 0


def _any_rank(mine: bool) -> bool:
    if _ranks() == 1:
        return mine
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    flag = torch.tensor([int(mine)], device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag.item())
