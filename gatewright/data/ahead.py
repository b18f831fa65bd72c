"""One step ahead: while a step trains, a thread makes the batches of the next, its schedule included."""

from concurrent.futures import Future, ThreadPoolExecutor

from gatewright.data.batch import Batch
from gatewright.data.loader import Loader


class Ahead:
    """A loader's batches, the next step's always in the making. What a step holds stays a function of its number."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step, and word to begin with those of the step after it."""
        made = self._next[1] if self._next and self._next[0] == step else self._pool.submit(self.loader.step, step)
        batches = made.result()
        self._next = (step + 1, self._pool.submit(self.loader.step, step + 1))
        return batches

    def close(self) -> None:
        """Lets go of the thread; what it is making is of no use any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
