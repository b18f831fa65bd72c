"""Finding: one thing that is wrong, or was, with the lines and numbers it rests on and what to change."""

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
Confidence = Literal["certain", "likely", "possible"]
Number = float | int | str
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of a file, and who wrote it where that is known."""

    file: str
    line: int
    """Counted from 1; 0 means the file as a whole."""
    text: str = ""
    """The line itself, shortened."""
    rank: int | None = None
    node: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting to change: one line taken out, one put in."""

    setting: str
    """Dotted key of the run file, option of a foreign tool, or environment variable."""
    value: str
    was: str = ""
    """What it is now; empty where that is not known."""
    where: str = ""
    """Whose setting: run file, environment, sbatch, DeepSpeed JSON …"""
    why: str = ""

    def diff(self) -> tuple[str, ...]:
        """The change as lines of a diff, of the place it is made in."""
        equals = "=" if self.where in {"environment", "sbatch", "command"} else ": "
        taken = (f"- {self.setting}{equals}{self.was}",) if self.was else ()
        return (*taken, f"+ {self.setting}{equals}{self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause or rule, as it applies here."""

    code: str
    """GW and three digits; `gatewright doctor --explain CODE` prints its page."""
    name: str
    """The code in words: oom-fragmentation."""
    kind: str
    """Family by which failures are counted: gpu_oom, nccl_timeout …"""
    severity: Severity
    text: str
    """One sentence with the numbers read."""
    confidence: Confidence = "certain"
    places: tuple[Place, ...] = ()
    """The lines it rests on, the first one first."""
    occurrences: int = 1
    numbers: tuple[tuple[str, Number], ...] = ()
    """(name with unit, value) in the order shown."""
    fix: tuple[str, ...] = ()
    """What to do, in sentences; the first is the one to try."""
    changes: tuple[Change, ...] = ()
    """The same as settings, where it is one."""
    source: str = ""

    @property
    def number(self) -> dict[str, Number]:
        return dict(self.numbers)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`; keys are those of this class."""
        return {
            "code": self.code,
            "name": self.name,
            "kind": self.kind,
            "severity": self.severity,
            "text": self.text,
            "confidence": self.confidence,
            "places": [
                {"file": p.file, "line": p.line, "text": p.text, "rank": p.rank, "node": p.node} for p in self.places
            ],
            "occurrences": self.occurrences,
            "numbers": dict(self.numbers),
            "fix": list(self.fix),
            "changes": [
                {"setting": c.setting, "value": c.value, "was": c.was, "where": c.where, "why": c.why}
                for c in self.changes
            ],
            "source": self.source,
        }
