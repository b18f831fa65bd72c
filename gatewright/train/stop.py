"""Asking a run to stop: once, it finishes its step and saves; twice, it stops where it is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by the first SIGINT, SIGTERM or SIGUSR1; the loop looks at it between steps."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def listen(announce: str, *, say: object = print) -> Iterator[StopRequest]:
    """Turns signals into a StopRequest inside the block; a second SIGINT raises KeyboardInterrupt at once."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not request and callable(say):
            say(announce)
        request.signal = signal.Signals(number).name

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
