"""One rank's failure ends all of them: within a bounded time, with the first cause told once, by its rank.

The first rank to fail writes its reason into the store that the ranks met at. The others learn of it where a
collective breaks, or, if they hang in one, from a thread that looks there every second; they end without a word.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from gatewright.parallel.ranks import Ranks
from gatewright.spec.errors import EndedByRank, GatewrightError, RankLost

FAILED = "gatewright/failed"
KNOWN = "gatewright/failure_known"
"""How many ranks know of the failure."""
LOOK_EVERY_S = 1.0
GRACE_S = 5.0
"""How long a rank may take to end by itself once another one has failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run of many ranks ended."""

    rank: int
    exit_code: int
    reason: str


@contextmanager
def fail_together(ranks: Ranks) -> Iterator[None]:
    """Ends every rank when one fails inside the block.

    The first failure is raised as it is, with its rank in front; on the others EndedByRank is, which has no text.
    """
    if ranks.alone:
        yield
        return
    watch = _Watch(ranks)
    try:
        yield
    except BaseException as error:
        first = watch.report(error)
        if ranks.first:
            watch.outlast()  # the store may live in this process: the others must have looked into it
        if first.rank != ranks.rank:
            raise EndedByRank(first.rank, first.exit_code) from error
        if isinstance(error, GatewrightError):
            raise type(error)(f"rank {ranks.rank}: {error}") from error
        if _is_lost_contact(error):
            raise RankLost(f"rank {ranks.rank}: {first.reason}") from error
        error.add_note(f"on rank {ranks.rank} of {ranks.size}")
        raise
    finally:
        watch.end()


class _Watch:
    """Looks for another rank's failure, and tells of this one's."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.store = dist.distributed_c10d._get_default_store()
        self.done = threading.Event()
        self.seen: Failure | None = None
        """The first failure of another rank."""
        self.counted = False
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def report(self, error: BaseException) -> Failure:
        """The run's first failure; this rank's own if no other had one."""
        if _is_lost_contact(error):
            # Most likely the consequence of another rank's end, whose reason may be on its way.
            until = time.monotonic() + 2 * LOOK_EVERY_S
            while self.seen is None and time.monotonic() < until:
                time.sleep(0.05)
        if self.seen is not None:
            return self.seen
        lost = _is_lost_contact(error)
        code = (
            error.exit_code
            if isinstance(error, GatewrightError)
            else 130
            if isinstance(error, KeyboardInterrupt)
            else 1
        )
        mine = Failure(self.ranks.rank, code, _lost(self.ranks, error) if lost else f"{type(error).__name__}: {error}")
        try:
            # Whoever writes first stays: compare_set changes the value only where there is none.
            first = Failure(**json.loads(self.store.compare_set(FAILED, "", json.dumps(asdict(mine)))))
            self._count_in()
            return first
        except (RuntimeError, ValueError):
            return mine  # the store went with its host

    def outlast(self) -> None:
        """Waits until every other rank knows of the failure, or is taken to be dead."""
        self.end()
        until = time.monotonic() + GRACE_S
        with suppress(RuntimeError):
            while self.store.add(KNOWN, 0) < self.ranks.size and time.monotonic() < until:
                time.sleep(0.05)

    def end(self) -> None:
        """Looks no more: a thread in the store while the interpreter ends would abort it."""
        self.done.set()
        self.thread.join(timeout=LOOK_EVERY_S)

    def _count_in(self) -> None:
        if not self.counted:
            self.counted = True
            with suppress(RuntimeError):
                self.store.add(KNOWN, 1)

    def _look(self) -> None:
        while not self.done.wait(LOOK_EVERY_S):
            try:
                failure = Failure(**json.loads(self.store.get(FAILED))) if self.store.check([FAILED]) else None
            except (RuntimeError, ValueError):
                return
            if failure is not None and failure.rank != self.ranks.rank:
                self.seen = failure
                self._count_in()
                if not self.done.wait(GRACE_S):
                    os._exit(failure.exit_code)
                return


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a collective broke, rather than our own code."""
    texts = ("gloo", "Connection", "NCCL", "Timed out", "timeout", "ProcessGroup", "Socket")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _lost(ranks: Ranks, error: BaseException) -> str:
    """What broke, and which ranks were behind the others when it did."""
    at = ranks.marks()
    behind = [rank for rank, step in at.items() if step == min(at.values())]
    where = ""
    if at and len(behind) < ranks.size:
        where = f"; behind the others: rank {', '.join(map(str, behind))}, last heard of in step {min(at.values())}"
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return f"lost contact with another rank ({first}){where}; a restart goes on from the newest checkpoint"
