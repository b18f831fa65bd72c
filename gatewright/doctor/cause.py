"""Cause: one known failure, the signs it is recognised by in a log, and the page that explains it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from gatewright.spec.finding import Change, Confidence, Finding, Number, Place, Severity


class Role(IntEnum):
    """What a sighting means for the order of a diagnosis; the lowest comes first."""

    ROOT = 0
    """Explains the end of the run by itself."""
    GENERIC = 1
    """Something died here; why is not said."""
    CASCADE = 2
    """Follows from a failure elsewhere."""
    HINT = 3
    """Did not stop the run, but may explain it or spoil its result."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A pattern, and literals of which a line that matches it must hold one.

    Lines are looked up by the literals after their digits were removed, so a literal has none.
    """

    literals: tuple[str, ...]
    pattern: re.Pattern[str]


def sign(*literals: str, pattern: str = "") -> Sign:
    """A sign by literals alone (any of them), or by a pattern that needs one of them."""
    assert literals and not any(re.search(r"\d", text) for text in literals), literals
    return Sign(literals, re.compile(pattern or "|".join(re.escape(text) for text in literals)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A line of a log that bears a sign of a cause."""

    cause: "Cause"
    groups: dict[str, str]
    """Named groups of the pattern that were found."""
    place: Place
    line: str
    """The line, as far as it is kept."""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All sightings of one cause in one life of a run: the first ones whole, the rest counted."""

    sightings: tuple[Sighting, ...]
    occurrences: int
    last_line: int

    @property
    def first(self) -> Sighting:
        return self.sightings[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What the rest of the log says that a judgement may lean on."""

    tool: str = ""
    """gatewright, huggingface, deepspeed, megatron or empty."""
    kinds: frozenset[str] = frozenset()
    """Kinds of everything sighted in this life."""
    steps: int = 0
    """Training steps that the log reports."""
    settings: dict[str, str] = field(default_factory=dict)
    """Dotted keys of the run file, where there is one."""


Judge = Callable[["Cause", Seen, Log], "Finding | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A row of the table of known failures."""

    code: str
    name: str
    kind: str
    title: str
    role: Role = Role.ROOT
    severity: Severity = "error"
    confidence: Confidence = "likely"
    signs: tuple[Sign, ...] = ()
    text: str
    """One sentence; `{name}` is a named group of the pattern, `?` where it was not found."""
    why: str
    fix: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    source: str = ""
    judge: Judge | None = None
    """Where one line does not settle it: turns the sightings into a finding, or into None."""
    outranks: int = 0
    """On one line the cause with the larger value is kept."""
    keep: int = 4
    """Sightings kept whole."""


class _Unread(dict[str, str]):
    def __missing__(self, _: str) -> str:
        return "?"


def finding(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """The cause as it applies to this log."""
    return (cause.judge or plain_finding)(cause, seen, log)


def plain_finding(
    cause: Cause,
    seen: Seen,
    log: Log,
    *,
    text: str = "",
    numbers: Sequence[tuple[str, Number]] = (),
    confidence: Confidence | None = None,
    fix: Sequence[str] = (),
    changes: Sequence[Change] = (),
) -> Finding:
    """A finding with the cause's own words, except what is given."""
    first = seen.first
    return Finding(
        code=cause.code,
        name=cause.name,
        kind=cause.kind,
        severity=cause.severity,
        text=text or cause.text.format_map(_Unread(first.groups)),
        confidence=confidence or cause.confidence,
        places=tuple(sighting.place for sighting in seen.sightings),
        occurrences=seen.occurrences,
        numbers=tuple(numbers) or tuple(first.groups.items()),
        fix=tuple(fix) or cause.fix,
        changes=tuple(_with_was(change, log) for change in (changes or cause.changes)),
        source=cause.source,
    )


def _with_was(change: Change, log: Log) -> Change:
    """The change with the present value, where the run file says it."""
    known = log.settings.get(change.setting, "") if change.where == "run file" else ""
    return replace(change, was=known) if known and not change.was else change


def env(name: str, value: str, *, was: str = "", why: str = "") -> Change:
    """An environment variable to set."""
    return Change(setting=name, value=value, was=was, where="environment", why=why)


def run_key(key: str, value: str, *, why: str = "") -> Change:
    """A key of our run file to set."""
    return Change(setting=key, value=value, where="run file", why=why)


def sbatch(option: str, value: str, *, was: str = "", why: str = "") -> Change:
    """An #SBATCH option to set."""
    return Change(setting=f"#SBATCH {option}", value=value, was=was, where="sbatch", why=why)
