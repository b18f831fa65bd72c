"""One log, read to the end: sightings of known failures by life of the run, and the numbers of its steps."""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from gatewright.doctor.cause import Cause, Role, Seen, Sighting, Sign, sign
from gatewright.doctor.metrics import SIGNS as METRIC_SIGNS
from gatewright.doctor.metrics import Series, read_point
from gatewright.doctor.phase import traceback_above
from gatewright.doctor.reader import Line, Reader
from gatewright.doctor.table import CAUSES, UNRECOGNISED
from gatewright.spec.finding import Place

_START_SIGNS = (
    sign(
        "Running training", "Setting OMP_NUM_THREADS", "using world size:", "SLURM_RESTART_COUNT", "Starting SLURM job"
    ),
    sign('"kind": "start"', '"kind":"start"'),
)
_END_SIGNS = (
    sign(
        "train_runtime",
        '"reason": "finished"',
        "Training completed",
        "[after training is done]",
        "exiting program after",
    ),
    sign("finished: ", pattern=r"^finished: [\d,]+ steps"),
)
_FAILED_SIGN = sign('"reason": "failed"')
_TOOL_SIGNS = (
    ("gatewright", sign('"time": "', "gatewright", pattern=r'^\{"v": \d+, "time": "|gatewright')),
    (
        "huggingface",
        sign("transformers/trainer", "trl/trainer", "Running training", "'learning_rate'", "per_device_train"),
    ),
    ("megatron", sign("megatron", "Megatron", "lm loss")),
    ("deepspeed", sign("deepspeed", "DeepSpeed")),
)
_SUSPICIOUS = sign(
    "rror",
    "RROR",
    "xception",
    "Traceback",
    "FATAL",
    "atal:",
    "ailed",
    "FAILED",
    "bort",
    "core dumped",
    "panic",
    "CRITICAL",
    pattern=(
        r"\b(?:\w*Error|ERROR|error:|\w*Exception|FATAL|[Ff]atal|FAILED|[Ff]ailed|[Aa]bort(?:ed|ing)?|"
        r"core dumped|panic|CRITICAL)\b"
    ),
)
_EXCEPTION = re.compile(
    r"^(?:\[?(?:rank|default|Rank )?\s*\d+\]?:\s*)?(?P<error>(?:\w+\.)*(?:\w*(?:Error|Exception|"
    r"Failure|Timeout))\b(?::.*)?)$"
)
_OUR_STEPS = re.compile(r'\{"v": .*"kind": "start".*"steps": (\d{1,18})')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_RANKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\[(?:rank|default)(\d{1,5})\]",
        r"\[[Rr]ank:? ?(\d{1,5})\]",
        r"^\s*(\d{1,5}): ",
        r"\[Rank (\d{1,5})[^\]]*\]",
        r"\b[Rr]ank[ =:](\d{1,5})\b",
        r"^srun: error: \S+: tasks? (\d{1,5})\b",
        r"\brank(\d{1,5})\b",
    )
)
_NODES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\bON (\S+) CANCELLED",
        r"^srun: error: (\S+): task",
        r"^(\S{1,64}):\d+:\d+ \[\d+\] (?:NCCL|RCCL)",
        r"\b(nid\d{4,})\b",
        r"[Nn]ode failure on (\S+)",
        r"slurmstepd-(\S+):",
        r"\bhost\s*:\s*(\S+)",
    )
)
_RANK_OF_FILE = re.compile(r"rank_?(\d{1,5})|/(\d{1,5})/std(?:err|out)\.log$")
STEPS_AFTER = 3
"""So many steps after an error say that the run went on; one or two may have been under way."""
MAX_SUSPICIOUS = 64
MAX_EXCEPTIONS = 64
SHOWN = 200


@dataclass(slots=True)
class Life:
    """From one start of the run to the next, within one log."""

    file: str
    first_line: int
    sightings: dict[str, list[Sighting]] = field(default_factory=dict)
    """By code of the cause, the first ones."""
    occurrences: dict[str, int] = field(default_factory=dict)
    exceptions: list[Sighting] = field(default_factory=list)
    """Last lines of tracebacks, and our own stop events of failed runs."""
    suspicious: list[Place] = field(default_factory=list)
    steps: int = 0
    recent_steps: list[int] = field(default_factory=list)
    """Lines of the last steps, the earliest of them first."""
    ended_well_line: int = 0
    last_line: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.exceptions) or any(
            sighting.cause.role is not Role.HINT for found in self.sightings.values() for sighting in found[:1]
        )

    def unexplained(self, codes: Collection[str]) -> list[Sighting]:
        """Exceptions that no cause of these codes was sighted in: on their line, or indented below it."""
        claimed: set[int] = set()
        for code in self.sightings.keys() & set(codes):
            for one in self.sightings[code]:
                claimed.add(one.place.line)
                if one.line[:1].isspace() and one.cause.role is not Role.CASCADE:
                    claimed.update(range(one.place.line - 3, one.place.line))
        return [one for one in self.exceptions if one.place.line not in claimed]

    def seen(self, code: str) -> Seen:
        found = self.sightings[code]
        return Seen(sightings=tuple(found), occurrences=self.occurrences[code], last_line=found[-1].place.line)


@dataclass(slots=True)
class Scan:
    """What one log holds."""

    file: str
    lives: list[Life]
    series: Series
    tools: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    bytes: int = 0


class Scanner:
    """Takes in the chunks of one log; `scan` is what it has found so far."""

    def __init__(self, file: str) -> None:
        self._plan = list(_plan())
        self._reader = Reader([one for one, _ in self._plan], numbers=[what == "metric" for _, what in self._plan])
        self._metrics = {index for index, (_, what) in enumerate(self._plan) if what == "metric"}
        self.scan = Scan(file=file, lives=[Life(file=file, first_line=1)], series=Series())
        found = _RANK_OF_FILE.search(file)
        self._rank = int(found[1] or found[2]) if found else None

    def feed(self, chunk: bytes) -> None:
        """More of the log."""
        self._take(self._reader.feed(chunk))

    def finish(self) -> Scan:
        """The end of the log: the scan, complete."""
        self._take(self._reader.finish())
        self.scan.lines, self.scan.bytes = self._reader.lines, self._reader.bytes
        self.scan.lives = [life for life in self.scan.lives if life.last_line or life is self.scan.lives[-1]]
        return self.scan

    def _take(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if self._metrics.intersection(line.matches) and (point := read_point(line.raw, line.number)):
                self.scan.series.add(point)
                life = self._life()
                if not point.bar:
                    life.steps += 1
                    life.recent_steps = [*life.recent_steps[1 - STEPS_AFTER :], line.number]
                life.last_line = line.number
            if line.first_visits:
                self._look(line)

    def _life(self) -> Life:
        return self.scan.lives[-1]

    def _look(self, line: Line) -> None:
        """All that is not numbers: signs of failures, starts and ends, exceptions, suspicious words."""
        text = line.text
        hits: list[tuple[Cause, dict[str, str]]] = []
        for index in line.matches:
            one, what = self._plan[index]
            found = one.pattern.search(text)
            if found is None:
                continue
            if isinstance(what, Cause):
                hits.append((what, {key: value for key, value in found.groupdict().items() if value}))
            elif what == "start":
                self._start(line)
            elif what == "end":
                self._life().ended_well_line = line.number
            elif what == "stop":
                self._stopped(line, text)
            elif what == "suspicious":
                self._suspect(line, text)
            elif what.startswith("tool:"):
                self.scan.tools[what[5:]] = self.scan.tools.get(what[5:], 0) + 1
        if hits:
            self._sight(line, text, hits)

    def _start(self, line: Line) -> None:
        """A new life of the run, if the last one did anything."""
        life = self._life()
        if life.failed or life.steps:
            self.scan.lives.append(Life(file=self.scan.file, first_line=line.number))
        self._life().last_line = line.number
        if found := _OUR_STEPS.match(line.text):
            self.scan.series.total_steps = int(found[1])

    def _stopped(self, line: Line, text: str) -> None:
        """Our own stop event of a failed run: its detail is the error."""
        try:
            detail = str(json.loads(line.raw)["detail"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        place = self._place(line.number, text)
        life = self._life()
        if len(life.exceptions) < MAX_EXCEPTIONS:
            groups = {"error": detail[:SHOWN]}
            life.exceptions.append(Sighting(cause=UNRECOGNISED, groups=groups, place=place, line=text))

    def _suspect(self, line: Line, text: str) -> None:
        life = self._life()
        life.last_line = line.number
        if len(life.suspicious) < MAX_SUSPICIOUS:
            life.suspicious.append(self._place(line.number, text))
        found = _EXCEPTION.match(text)
        if found is None or len(life.exceptions) >= MAX_EXCEPTIONS:
            return
        before, after = line.around()
        if not traceback_above(before) or any(mark in later for later in after[:6] for mark in _CHAINED):
            return
        groups = {"error": found["error"][:SHOWN]}
        life.exceptions.append(
            Sighting(cause=UNRECOGNISED, groups=groups, place=self._place(line.number, text), line=text)
        )

    def _sight(self, line: Line, text: str, hits: list[tuple[Cause, dict[str, str]]]) -> None:
        """Keeps the hits of the highest rank, and one a cause."""
        life = self._life()
        life.last_line = line.number
        highest = max(cause.outranks for cause, _ in hits)
        around = None
        for cause, groups in {cause.code: (cause, groups) for cause, groups in reversed(hits)}.values():
            if cause.outranks < highest:
                continue
            kept = life.sightings.setdefault(cause.code, [])
            life.occurrences[cause.code] = life.occurrences.get(cause.code, 0) + 1
            if len(kept) < cause.keep:
                around = around or line.around()
                place = self._place(line.number, text, node=groups.get("node"))
                kept.append(
                    Sighting(cause=cause, groups=groups, place=place, line=text, before=around[0], after=around[1])
                )

    def _place(self, number: int, text: str, node: str | None = None) -> Place:
        rank = next((int(found[1]) for pattern in _RANKS if (found := pattern.search(text))), self._rank)
        node = node or next((found[1] for pattern in _NODES if (found := pattern.search(text))), None)
        return Place(file=self.scan.file, line=number, text=text.strip()[:SHOWN], rank=rank, node=node)


def scan_log(chunks: Iterable[bytes], *, file: str) -> Scan:
    """Reads one log to the end."""
    scanner = Scanner(file)
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.finish()


def _plan() -> Iterator[tuple[Sign, Cause | str]]:
    for cause in CAUSES:
        for one in cause.signs:
            yield one, cause
    for one in _START_SIGNS:
        yield one, "start"
    for one in _END_SIGNS:
        yield one, "end"
    for one in METRIC_SIGNS:
        yield one, "metric"
    for tool, one in _TOOL_SIGNS:
        yield one, f"tool:{tool}"
    yield _FAILED_SIGN, "stop"
    yield _SUSPICIOUS, "suspicious"
