"""The processes that worked on a run: when each did, and how the last one ended."""

from datetime import UTC, datetime

from gatewright.report.events import Line
from gatewright.spec.event import DataLoaded, Event, Finding, ModelLoaded, Start, Stop


class Process:
    """One process. It loads data and model and says so, then starts, then works."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self._prepared: set[str] = set()
        self._worked = False
        self._begin = self._end = ""

    def is_over_before(self, event: Event) -> bool:
        """Whether the event can only be another process's: a kill leaves no word, so the next one's first tells."""
        prepares = _preparation(event)
        return prepares is not None and (self._worked or prepares in self._prepared)

    def see(self, event: Event, *, first_time: str, time: str) -> None:
        """Counts an event; `first_time` is that of the findings before it that may be its process's."""
        prepares = _preparation(event)
        if prepares is None:
            self._worked = True
        else:
            self._prepared.add(prepares)
        if isinstance(event, Stop):
            self.stop = event
        self._begin = self._begin or first_time
        self._end = time

    @property
    def seconds(self) -> float:
        """Time from its first event to its last."""
        begin, end = parse_time(self._begin), parse_time(self._end)
        return max(0.0, (end - begin).total_seconds()) if begin and end else 0.0


class Processes:
    """Splits the lines into processes; memory grows with restarts only."""

    def __init__(self) -> None:
        self.all: list[Process] = []
        self._findings_since: str | None = None
        self._last_time = ""

    def take(self, line: Line) -> None:
        """Counts a line. Findings belong to the process of the next other event: one may come before all else."""
        self._last_time = line.time
        if isinstance(line.event, Finding):
            self._findings_since = self._findings_since or line.time
            return
        if not self.all or self.all[-1].is_over_before(line.event):
            self.all.append(Process())
        self.all[-1].see(line.event, first_time=self._findings_since or line.time, time=line.time)
        self._findings_since = None

    @property
    def stop(self) -> Stop | None:
        """How the last process ended; None if it works, or was killed."""
        return self.all[-1].stop if self.all and self._findings_since is None else None

    @property
    def last_event(self) -> datetime | None:
        return parse_time(self._last_time)


def _preparation(event: Event) -> str | None:
    """A name for what a process does once, before it works; None for work."""
    match event:
        case Start():
            return "start"
        case ModelLoaded():
            return "model"
        case DataLoaded():
            return f"data {event.split}"
        case _:
            return None


def parse_time(text: str) -> datetime | None:
    """The time of an ISO 8601 text, UTC if it does not say; None if it is none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
