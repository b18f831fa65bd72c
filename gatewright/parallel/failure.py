"""One rank's failure ends all of them: within a bounded time, with the first cause told once, by its rank.

The first rank to fail writes its reason into the store that the ranks met at. The others learn of it where a
collective breaks, or, if they hang in one, from a thread that looks there every second; they end without a word.
While ranks connect, that thread also looks for signs of life (alive.py), and writes the reason for a rank that died.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from gatewright.parallel import alive
from gatewright.parallel.alive import Signs
from gatewright.parallel.meeting import Meeting
from gatewright.spec.errors import EndedByRank, GatewrightError, RankLost

FAILED, KNOWN, DONE = "failed", "failure_known", "done"
"""Topics at the meeting: the first failure, who knows of it, and who came to the end without one."""
LOOK_EVERY_S = 1.0
SETTLE_S = 0.5
"""How long a rank that lost contact waits for the reason: one that fails leaves it before its connections close."""
GRACE_S = 5.0
"""How long a rank may take to end by itself once another one has failed."""
PATIENCE_S = {KNOWN: 2 * LOOK_EVERY_S, DONE: GRACE_S}
"""How long the first rank waits for the others at its end; one that died does not come."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run of many ranks ended."""

    rank: int
    exit_code: int
    reason: str


@contextmanager
def fail_together(meeting: Meeting) -> Iterator[None]:
    """Ends every rank when one fails inside the block.

    The first failure is raised as it is, with its rank in front; on the others EndedByRank is, which has no text.
    """
    watch, rank = _Watch(meeting), meeting.place.rank
    try:
        yield
        watch.leave(DONE)
    except BaseException as error:
        first = watch.report(error)
        watch.leave(KNOWN)
        if first.rank != rank:
            raise EndedByRank(first.rank, first.exit_code) from error
        if isinstance(error, GatewrightError):
            raise type(error)(f"rank {rank}: {error}") from error
        if _is_lost_contact(error):
            raise RankLost(f"rank {rank}: {first.reason}") from error
        error.add_note(f"on rank {rank} of {meeting.place.size}")
        raise
    finally:
        watch.end()


class _Watch:
    """Looks for another rank's failure, and tells of this one's."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.signs = meeting, Signs(meeting)
        self.ended = threading.Event()
        self.seen: Failure | None = None
        """The first failure of another rank."""
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def report(self, error: BaseException) -> Failure:
        """The run's first failure; this rank's own if no other had one."""
        lost = _is_lost_contact(error)
        if lost:
            # Most likely the consequence of another rank's end, whose reason may be on its way.
            time.sleep(SETTLE_S)
        if self.seen is not None:
            return self.seen
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        code = error.exit_code if isinstance(error, GatewrightError) else code
        reason = _lost(self.meeting, error) if lost else f"{type(error).__name__}: {error}"
        mine = Failure(self.meeting.place.rank, code, reason)
        try:
            return Failure(**self.meeting.first_word(FAILED, asdict(mine)))
        except (RuntimeError, ValueError):
            return mine  # the store went with its host

    def leave(self, topic: str) -> None:
        """Ends the watch; the first rank, whose process may be the store's, waits for the others for a while."""
        self.end()
        with suppress(RuntimeError):
            self.meeting.count_in(topic)
            if self.meeting.place.rank == 0:
                self.meeting.outlast(topic, patience_s=PATIENCE_S[topic])

    def end(self) -> None:
        """Looks no more: a thread in the store while the interpreter ends would abort it."""
        self.ended.set()
        self.thread.join(timeout=LOOK_EVERY_S)

    def _look(self) -> None:
        rank = self.meeting.place.rank
        while not self.ended.wait(LOOK_EVERY_S):
            try:
                said, missed = self.meeting.said(FAILED), self.signs.missed()
                if said is None and missed is not None:
                    mine = Failure(rank, RankLost.exit_code, _silent(missed))
                    said = self.meeting.first_word(FAILED, asdict(mine))
                    if said == asdict(mine):
                        self._end_by_force(mine.exit_code, f"error: rank {rank}: {mine.reason}")
                        return
            except (RuntimeError, ValueError):
                self._end_by_force(1, f"error: rank {rank}: rank 0 has gone, and with it the ranks' store")
                return
            if said is not None and said["rank"] != rank:
                self.seen = Failure(**said)
                self._end_by_force(self.seen.exit_code)
                return

    def _end_by_force(self, code: int, text: str = "") -> None:
        """Ends the process where it does not end by itself: it hangs in a collective, and will not come to `leave`."""
        if not self.ended.wait(GRACE_S):
            sys.stderr.write(text and f"{text}\n")
            sys.stderr.flush()
            os._exit(code)


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a collective broke, rather than our own code."""
    texts = ("gloo", "Connection", "NCCL", "Timed out", "timeout", "ProcessGroup", "Socket")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _silent(rank: int) -> str:
    patience = f"{alive.SILENCE_S:.0f} s"
    return f"rank {rank} came, and then was not heard of for {patience} while ranks connected; look into its log"


def _lost(meeting: Meeting, error: BaseException) -> str:
    """What broke, and which ranks were behind the others when it did."""
    at = meeting.marks()
    behind = [rank for rank, step in at.items() if step == min(at.values())]
    where = ""
    if at and len(behind) < meeting.place.size:
        where = f"; behind the others: rank {', '.join(map(str, behind))}, last heard of in step {min(at.values())}"
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return f"lost contact with another rank ({first}){where}; a restart goes on from the newest checkpoint"
