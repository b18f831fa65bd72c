"""A verdict as text for a terminal, JSON, SARIF and GitHub annotations: pure functions of it."""

import json
import textwrap
from itertools import takewhile
from typing import Any

from gatewright import __version__
from gatewright.preflight.catalogue import FAMILIES
from gatewright.preflight.check import Verdict
from gatewright.preflight.fix import diffs, safe_repairs
from gatewright.spec.finding import Finding, Severity

WIDTH = 100
MAX_UNREAD = 10
_GITHUB: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}
_PLURAL: dict[Severity, str] = {"error": "errors", "warning": "warnings", "note": "notes"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render_text(verdict: Verdict, *, width: int = WIDTH) -> str:
    """The verdict for people: one paragraph a finding, the worst first, and what was not read or judged."""
    parts = [_head(verdict)]
    repairs = {repair.code: repair for repair in verdict.repairs}
    for finding in verdict.findings:
        parts.append(_paragraph(finding, width))
        if repair := repairs.get(finding.code):
            changed = "".join(diffs(verdict, [repair]).values())
            lines = [line for line in changed.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
            parts[-1] += "".join(f"\n    {line}" for line in _around_the_change(lines, width - 4))
    parts.append(_unread(verdict, width))
    parts += [textwrap.fill(f"Not judged: {text}", width) for text in verdict.unjudged]
    parts.append(_tail(verdict))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(verdict: Verdict) -> str:
    tools = f" ({', '.join(verdict.tools)})" if verdict.tools else ""
    return textwrap.fill(f"{', '.join(verdict.files)}{tools}", WIDTH, subsequent_indent="  ")


def _paragraph(finding: Finding, width: int) -> str:
    where = str(finding.places[0]) if finding.places else ""
    head = f"{finding.severity:<7} {finding.code} {finding.name}"
    first = f"{head}{where:>{max(1, width - len(head))}}" if len(head) + len(where) < width else f"{head}\n  {where}"
    fill = {"width": width, "initial_indent": "  ", "subsequent_indent": "  "}
    body = "\n".join(textwrap.fill(line, **fill) for line in finding.text.splitlines())  # type: ignore[arg-type]
    fixes = [textwrap.fill(f"→ {text}", width, initial_indent="  ", subsequent_indent="    ") for text in finding.fix]
    return "\n".join([first, body, *fixes])


def _around_the_change(lines: list[str], width: int) -> list[str]:
    """Lines of a diff cut to the width; where they are long, from shortly before the place in which they differ."""
    if all(len(line) <= width for line in lines):
        return lines
    pairs = zip(lines[0][1:], lines[-1][1:], strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) if len(lines) > 1 else 0
    begin = max(0, same - width // 2)
    return [f"{line[0]}{'…' if begin else ''}{line[1 + begin :]}"[:width] for line in lines]


def _unread(verdict: Verdict, width: int) -> str:
    if not verdict.unread:
        return ""
    shown = [f"  {unread}"[:width] for unread in verdict.unread[:MAX_UNREAD]]
    more = len(verdict.unread) - MAX_UNREAD
    rest = [f"  and {more} more"] if more > 0 else []
    return "\n".join(["Not understood, and not guessed:", *shown, *rest])


def _tail(verdict: Verdict) -> str:
    severities: tuple[Severity, ...] = ("error", "warning", "note")
    counts = [
        f"{count} {severity if count == 1 else _PLURAL[severity]}"
        for severity in severities
        if (count := verdict.count(severity))
    ]
    text = ", ".join(counts) or "Nothing found"
    safe = len(diffs(verdict, safe_repairs(verdict)))
    aside = f"; {verdict.ignored} ignored by comments" if verdict.ignored else ""
    return f"{text}{aside}." + (" --fix applies the safe changes." if safe else "")


def as_json(verdict: Verdict) -> str:
    """Everything, for programs; diffs by file are of all repairs, safe_diffs of those that --fix applies."""
    return json.dumps(
        {
            "version": 1,
            "gatewright": __version__,
            "files": list(verdict.files),
            "tools": list(verdict.tools),
            "exit_code": verdict.exit_code,
            "findings": [finding.as_json() for finding in verdict.findings],
            "diffs": diffs(verdict, verdict.repairs),
            "safe_diffs": diffs(verdict, safe_repairs(verdict)),
            "unread": [
                {"key": unread.key, "file": unread.file, "line": unread.line, "why": unread.why}
                for unread in verdict.unread
            ],
            "unjudged": list(verdict.unjudged),
            "ignored": verdict.ignored,
        },
        indent=2,
        ensure_ascii=False,
    )


def as_sarif(verdict: Verdict) -> str:
    """SARIF 2.1.0, for code scanning."""
    rules = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.name.replace("-", " ")},
            "fullDescription": {"text": rule.reason},
            "properties": {"family": family, "source": rule.source},
        }
        for family, members in FAMILIES
        for rule in members
    ]
    driver = {"name": "gatewright", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(finding) for finding in verdict.findings]}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _result(finding: Finding) -> dict[str, Any]:
    locations = [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": place.file.lstrip("/")},
                "region": {"startLine": max(1, place.line)},
            }
        }
        for place in finding.places
    ]
    text = " ".join([finding.text, *(f"Fix: {fix}." for fix in finding.fix)])
    return {"ruleId": finding.code, "level": finding.severity, "message": {"text": text}, "locations": locations}


def as_github(verdict: Verdict) -> str:
    """One workflow command a finding; newlines and commas are escaped as GitHub wants it."""
    return "".join(f"{_annotation(finding)}\n" for finding in verdict.findings)


def _annotation(finding: Finding) -> str:
    place = finding.places[0] if finding.places else None
    where = f"file={_property(place.file)},line={max(1, place.line)}," if place else ""
    text = (
        "\n".join([finding.text, *(f"→ {fix}" for fix in finding.fix)])
        .replace("%", "%25")
        .replace("\r", "%0D")
        .replace("\n", "%0A")
    )
    return f"::{_GITHUB[finding.severity]} {where}title={finding.code} {finding.name}::{text}"


def _property(text: str) -> str:
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), (":", "%3A"), (",", "%2C")):
        text = text.replace(char, code)
    return text
