"""A diagnosis on a terminal: the root first, with its lines and its fix; 100 columns."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gatewright.doctor.diagnosis import Diagnosis
from gatewright.doctor.health import Progress
from gatewright.spec.finding import Change, Finding, Place

WIDTH = 100
_PLACES_SHOWN = 3
_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_NOTHING_KNOWN = "Nothing in this log is a known failure. The earliest suspicious lines:"
_HEADLINE = {
    "failed": "Root cause",
    "unknown": "Root cause not known",
    "healthy": "No failure found: the run goes on",
    "finished": "The run finished",
}


def render_text(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis as a rich renderable for a console of at least `WIDTH` columns."""
    parts: list[RenderableType] = [Text(_scope(diagnosis), style="dim", overflow="fold"), Text()]
    parts.append(Text(_HEADLINE[diagnosis.verdict], style="bold"))
    if diagnosis.root:
        parts += _whole(diagnosis.root)
    elif diagnosis.verdict == "unknown":
        known = "No sign of a failure, and no training step." if not diagnosis.earliest else _NOTHING_KNOWN
        parts.append(_indented(Text(known)))
    parts += [
        _indented(_place(place)) for place in diagnosis.earliest if not diagnosis.root or diagnosis.verdict == "unknown"
    ]
    parts += _section("Other failures it does not explain", diagnosis.others)
    parts += _section("May have led to it" if diagnosis.root else "Worth knowing", diagnosis.contributing)
    parts += _section("Consequences", diagnosis.consequences)
    parts += _section("Earlier lives of this run ended by", diagnosis.earlier)
    parts += _progress(diagnosis.progress)
    parts += _section("Health", diagnosis.health)
    parts += [Text(f"note: {note}", style="dim", overflow="fold") for note in diagnosis.notes]
    return Group(*parts)


def _scope(diagnosis: Diagnosis) -> str:
    count = len(diagnosis.files)
    what = diagnosis.files[0] if count == 1 else f"{count} logs"
    lives = f", {diagnosis.lives} lives of the run" if diagnosis.lives > 1 else ""
    tool = f", written by {diagnosis.tool}" if diagnosis.tool else ""
    return f"{what}: {diagnosis.lines:,} lines{lives}{tool}"


def _whole(finding: Finding) -> list[RenderableType]:
    """A finding with all that is known of it."""
    parts: list[RenderableType] = [
        _indented(_title(finding)),
        _indented(Text(finding.text, overflow="fold")),
        *(_indented(_place(place), 4) for place in finding.places[:_PLACES_SHOWN]),
    ]
    more = finding.occurrences - min(len(finding.places), _PLACES_SHOWN)
    if more > 0:
        parts.append(_indented(Text(f"and {more} more", style="dim"), 4))
    parts += [_indented(_numbered(number, text)) for number, text in enumerate(finding.fix, 1)]
    parts += [_indented(row, 5) for row in _diff(finding.changes)]
    parts.append(_indented(Text(f"More: gatewright doctor --explain {finding.code}", style="dim")))
    return parts


def _title(finding: Finding) -> Text:
    return Text.assemble(
        (f"{finding.code} {finding.name}", _STYLE[finding.severity]), f"  ({finding.confidence})", overflow="fold"
    )


def _place(place: Place) -> Text:
    who = f" rank {place.rank}" if place.rank is not None else ""
    who += f" on {place.node}" if place.node else ""
    return Text.assemble((f"{place}{who}", "cyan"), f"  {place.text[:160]}" if place.text else "", overflow="fold")


def _numbered(number: int, text: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row(Text(f"{number}."), Text(text))
    return table


def _diff(changes: Sequence[Change]) -> Iterable[Text]:
    """The changes as a diff, under the name of the place they are made in."""
    where = None
    for change in changes:
        if change.where != where:
            where = change.where
            yield Text(f"@@ {where or 'setting'}", style="cyan")
        for line in change.diff():
            yield Text(line, style="red" if line.startswith("-") else "green", overflow="fold")


def _section(title: str, findings: Sequence[Finding]) -> list[RenderableType]:
    """Findings in a line each, with what to do about them."""
    if not findings:
        return []
    parts: list[RenderableType] = [Text(), Text(title, style="bold")]
    for finding in findings:
        at = f"  {finding.places[0]}" if finding.places else ""
        times = f", {finding.occurrences} times" if finding.occurrences > 1 else ""
        parts.append(_indented(Text.assemble(_title(finding), (f"{at}{times}", "cyan"), overflow="fold")))
        parts.append(_indented(Text(finding.text, overflow="fold"), 4))
    return parts


def _progress(progress: Progress | None) -> list[RenderableType]:
    if progress is None:
        return []
    parts = []
    if progress.step is not None:
        of = f" of {progress.total_steps:,}" if progress.total_steps else ""
        parts.append(f"step {progress.step:,}{of}")
    if math.isfinite(progress.loss_last):
        parts.append(f"loss {progress.loss_first:.4g} to {progress.loss_last:.4g}")
    if math.isfinite(progress.step_s):
        parts.append(f"{progress.step_s:.3g} s a step")
    if math.isfinite(progress.remaining_s) and progress.remaining_s > 0:
        parts.append(f"{clock(progress.remaining_s)} left")
    return [Text(), Text.assemble(("Progress  ", "bold"), ", ".join(parts), overflow="fold")] if parts else []


def clock(seconds: float) -> str:
    """Seconds as days, hours and minutes."""
    minutes = round(seconds / 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _indented(content: RenderableType, columns: int = 2) -> Padding:
    return Padding(content, (0, 0, 0, columns))
