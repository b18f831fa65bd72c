"""Rule and Fault: one thing that can be wrong with a Job, and what it looks like when it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gatewright.preflight.job import Job, Written
from gatewright.spec.finding import Severity


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one line of the user's own file."""

    action: Literal["set", "add", "drop"]
    """set: another value. add: a line after this one. drop: the line goes."""
    at: Written[Any]
    text: str = ""
    """The new value, or the new line without its indentation."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule broken by this job."""

    text: str
    """One sentence with the numbers read."""
    at: tuple[Written[Any], ...] = ()
    """The values it rests on, the one to change first."""
    fix: str = ""
    """What to do, in a sentence."""
    edit: Edit | None = None


Judge = Callable[[Job], Fault | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the catalogue; its reason is the docstring of its function."""

    code: str
    severity: Severity
    judge: Judge
    source: str
    """Thread, document or measurement it rests on."""
    safe: bool = False
    """`--fix` may apply its edit: the run computes the same, or could not have run at all."""
    name: str = ""
    """The code in words: save-interval-longer-than-job. Empty: the function's name."""
    reason: str = ""
    """Why it is wrong. Empty: the function's docstring."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.judge.__name__.replace("_", "-"))
        if not self.reason:
            object.__setattr__(self, "reason", " ".join((self.judge.__doc__ or "").split()))


def set_to(at: Written[Any], value: object) -> Edit | None:
    """Give a written value another one; a default has no line to change."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Edit("set", at, text) if at.given and at.line else None


def add_after(at: Written[Any], line: str) -> Edit | None:
    return Edit("add", at, line) if at.given and at.line else None


def drop(at: Written[Any]) -> Edit | None:
    return Edit("drop", at) if at.given and at.line else None
