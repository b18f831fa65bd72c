"""A rule, a set of files that breaks it, and one that does not."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight_texts import File

from gatewright.preflight.check import Verdict, check
from gatewright.preflight.gather import Given


@dataclass(frozen=True)
class Case:
    code: str
    bad: list[File]
    good: list[File]
    given: dict[str, Any] = field(default_factory=dict)


def verdict(files: list[File], folder: Path, given: dict[str, Any], **options: Any) -> Verdict:
    """The files written into a folder, and judged together."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8")
    return check([folder / name for name, _ in files], given=Given(**given), **options)


def codes(found: Verdict) -> list[str]:
    return [finding.code for finding in found.findings]
