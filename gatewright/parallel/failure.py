"""One rank's failure ends all of them: within a bounded time, with the first cause told once, by its rank.

The first rank to fail writes its reason into the store that the ranks met at. The others learn of it where a
collective breaks, or, if they hang in one, from a thread that looks there every second; they end without a word.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

from gatewright.parallel.ranks import Ranks
from gatewright.spec.errors import EndedByRank, GatewrightError, RankLost

FAILED = "gatewright/failed"
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
    store = dist.distributed_c10d._get_default_store()
    done = threading.Event()
    threading.Thread(target=_watch, args=(store, ranks.rank, done), daemon=True).start()
    try:
        yield
    except BaseException as error:
        first = _report(store, ranks, error)
        if first.rank != ranks.rank:
            raise EndedByRank(first.rank, first.exit_code) from error
        if isinstance(error, GatewrightError):
            raise type(error)(f"rank {ranks.rank}: {error}") from error
        if _is_lost_contact(error):
            raise RankLost(f"rank {ranks.rank}: {first.reason}") from error
        error.add_note(f"on rank {ranks.rank} of {ranks.size}")
        raise
    finally:
        done.set()


def _report(store: dist.Store, ranks: Ranks, error: BaseException) -> Failure:
    """The run's first failure; this rank's own if no other had one."""
    if _is_lost_contact(error):
        # Most likely the consequence of another rank's end, whose reason may be on its way.
        _wait_for(store, seconds=2 * LOOK_EVERY_S)
    code = error.exit_code if isinstance(error, GatewrightError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    reason = _lost(ranks, error) if _is_lost_contact(error) else f"{type(error).__name__}: {error}"
    mine = Failure(ranks.rank, code, reason)
    try:
        # Whoever writes first stays: compare_set changes the value only where there is none.
        told = store.compare_set(FAILED, "", json.dumps(asdict(mine)))
        return Failure(**json.loads(told))
    except (RuntimeError, ValueError):
        return mine  # the store went with its host


def _watch(store: dist.Store, rank: int, done: threading.Event) -> None:
    while not done.wait(LOOK_EVERY_S):
        failure = _read(store)
        if failure is not None and failure.rank != rank:
            if not done.wait(GRACE_S):
                os._exit(failure.exit_code)
            return


def _read(store: dist.Store) -> Failure | None:
    try:
        return Failure(**json.loads(store.get(FAILED))) if store.check([FAILED]) else None
    except (RuntimeError, ValueError):
        return None


def _wait_for(store: dist.Store, *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and _read(store) is None:
        time.sleep(0.05)


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
