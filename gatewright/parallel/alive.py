"""Signs of life while ranks connect: one that dies after they met, and before others hear it go, is not waited for.

Once ranks are connected, a connection that closes tells of its end. Until then each leaves a count at the meeting,
every time it looks there. The first rank watches the others', and they watch the first's.
"""

import time

from gatewright.parallel.meeting import HERE, Meeting

CONNECTED = "connected"
"""Topic at the meeting: ranks that have all their connections."""
SILENCE_S = 30.0
"""A rank whose count has stood still for so long is dead, or as good as that: a thread of its own leaves it."""


class Signs:
    """This rank's signs, and those of the ranks that it watches."""

    def __init__(self, meeting: Meeting) -> None:
        """To be made before the rank counts itself in: then all have left a sign once all have come."""
        self.meeting = meeting
        self.watched = range(1, meeting.place.size) if meeting.place.rank == 0 else range(1)
        self.left = 0
        self.heard: dict[int, tuple[str, float]] = {}
        """By rank: the last sign, and when it was new."""
        self.over = False
        meeting.sign("0")

    def missed(self) -> int | None:
        """Leaves a sign; returns a watched rank that has been silent for too long. None once all are connected."""
        if self.over:
            return None
        self.left += 1
        self.meeting.sign(str(self.left))
        if self.meeting.all_in(CONNECTED):
            self.over = True
        elif self.meeting.all_in(HERE):
            now = time.monotonic()
            for rank, sign in zip(self.watched, self.meeting.signs(self.watched), strict=True):
                last, since = self.heard.get(rank, ("", now))
                if sign != last:
                    self.heard[rank] = (sign, now)
                elif now - since > SILENCE_S:
                    return rank
        return None
