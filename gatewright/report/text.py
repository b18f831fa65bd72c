"""The report on a terminal: one answer first, then the tables; 100 columns."""

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gatewright.report import facts, units
from gatewright.report.loads import STARVED, LayerLoad, Loads
from gatewright.report.router import guard_rows, health_rows
from gatewright.report.series import Series
from gatewright.report.summary import Report

WIDTH = 100
_BLOCKS = "▁▂▃▄▅▆▇█"
_CHART_COLUMNS = 48
_HEAT_COLUMNS = 64
_LAYERS_SHOWN = 16
_EVALUATIONS_SHOWN = 8
_ANSWERS_SHOWN = 3
_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow"}


def render_text(report: Report) -> RenderableType:
    """The report as a rich renderable for a console of at least `WIDTH` columns."""
    parts: list[RenderableType] = [Text(facts.headline(report), style="bold", overflow="fold")]
    if note := facts.state_note(report):
        parts.append(Text(note))
    parts += _findings(report)
    parts += _section("Training", _facts(facts.training(report)), _sparkline("loss", report.curves.loss))
    parts += _held_out(report)
    parts += _throughput(report)
    for split in report.data:
        parts += _section(f"Data: {facts.split_name(split)}", _facts(facts.data(split)), _fills(facts.fills(split)))
    parts += _model(report)
    if report.loads:
        parts += _routing(report, report.loads)
    parts += _router(report)
    parts += _checkpoints(report)
    parts += _answers(report)
    parts += _unread(report)
    return Group(*parts)


def _router(report: Report) -> list[RenderableType]:
    if not report.looks:
        return []
    table = _table(["", "at step 0", f"at step {units.count(report.looks[-1].step)}"], words=[""])
    for row in health_rows(report):
        table.add_row(*row)
    acts = Table.grid(padding=(0, 2), pad_edge=False)
    for step, level, action, detail, _ in guard_rows(report):
        acts.add_row(Text(f"step {step}"), Text(level), Text(action), Text(detail, overflow="fold"))
    return _section("Router, on a fixed probe", table, acts if report.guard else None)


def _section(title: str, *content: RenderableType | None) -> list[RenderableType]:
    shown = [part for part in content if part is not None]
    return [Text(), Text(title, style="bold"), *shown] if shown else []


def _facts(pairs: Iterable[facts.Fact]) -> Table | None:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="dim", width=26)
    table.add_column(overflow="fold", max_width=WIDTH - 30)
    for label, value in pairs:
        table.add_row(Text(label), Text(value))
    return table if table.row_count else None


def _table(columns: Sequence[str], *, words: Sequence[str] = ()) -> Table:
    """A table whose columns hold numbers, except those named in `words`."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="dim", show_edge=False, collapse_padding=True
    )
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    return table


def _findings(report: Report) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    for finding in report.findings:
        style = _SEVERITY_STYLE.get(finding.severity, "")
        table.add_row(Text(finding.severity, style=style), Text(finding.text, overflow="fold"))
    return _section("Findings", table) if report.findings else []


def _sparkline(label: str, series: Series) -> Table | None:
    """A row of blocks, linear from the lowest to the highest value of the series."""
    values = _thin(series.mean, limit=_CHART_COLUMNS)
    finite = [value for value in values if math.isfinite(value)]
    if len(values) < 3 or not finite:
        return None
    low, span = min(finite), max(finite) - min(finite)
    marks = "".join(_block((value - low) / span if span else 0.0) for value in values)
    return _facts([(f"{label}, {units.decimal(low)}–{units.decimal(low + span)}", marks)])


def _block(height: float) -> str:
    """The block for a height of 0 to 1; × for NaN."""
    return _BLOCKS[min(7, max(0, int(height * 8)))] if math.isfinite(height) else "×"


def _thin(values: Sequence[float], *, limit: int) -> list[float]:
    """Means of at most `limit` groups of neighbours."""
    width = max(1, -(-len(values) // limit))
    groups = [[v for v in values[i : i + width] if math.isfinite(v)] for i in range(0, len(values), width)]
    return [math.fsum(group) / len(group) if group else math.nan for group in groups]


def _held_out(report: Report) -> list[RenderableType]:
    rows = list(report.evaluations)
    if not rows:
        return []
    left_out = len(rows) - _EVALUATIONS_SHOWN
    if left_out > 0:
        rows = rows[:2] + rows[-(_EVALUATIONS_SHOWN - 2) :]
    table = _table(facts.evaluation_columns())
    for row in rows:
        table.add_row(*facts.evaluation_row(row))
    note = Text(f"{units.plural(left_out, 'evaluation')} between them not shown", style="dim") if left_out > 0 else None
    return _section("Held out", table, note)


def _throughput(report: Report) -> list[RenderableType]:
    parts = [(name, seconds) for name, seconds in facts.clock(report) if seconds > 0]
    total_s = math.fsum(seconds for _, seconds in parts)
    table = _table(["where the time went", "time", "share"], words=["where the time went"])
    for name, seconds in parts:
        table.add_row(name, units.duration(seconds), units.share(seconds / total_s))
    pace = _section("Throughput", _facts(facts.throughput(report)))
    return [*pace, Text(), table] if parts else pace


def _fills(rows: list[tuple[str, float, str]]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="dim", width=26)
    table.add_column(justify="right", width=7)
    for what, fill, remark in rows:
        full = round(20 * fill)
        table.add_row(f"fill, {what}", units.share(fill), "█" * full + "░" * (20 - full), remark)
    return table


def _model(report: Report) -> list[RenderableType]:
    if report.model is None:
        return _section("Machine", _facts(facts.machine(report)))
    table = _table(facts.coverage_columns(), words=["role", "trains"])
    for row in report.model.coverage:
        table.add_row(*facts.coverage_row(row))
    about = _section("Model", _facts([*facts.model(report.model), *facts.machine(report)]))
    return [*about, *(_section("What trains", table) if report.model.coverage else [])]


def _routing(report: Report, loads: Loads) -> list[RenderableType]:
    layers = list(loads.layers)
    worst_first = sorted(layers, key=lambda layer: (-len(layer.dead + layer.starved), -layer.max_load))[:_LAYERS_SHOWN]
    shown = [layer for layer in layers if layer in worst_first]
    group = max(1, -(-len(layers[0].load) // _HEAT_COLUMNS))
    table = _table(["layer", "load by expert", "max", "CV", "dead", "starved"], words=["load by expert"])
    table.columns[1].no_wrap = True
    for layer in shown:
        table.add_row(
            str(layer.layer),
            _heat_row(layer, group=group),
            f"{layer.max_load:.2f}",
            f"{layer.variation:.2f}",
            str(len(layer.dead)) if layer.dead else "–",
            str(len(layer.starved)) if layer.starved else "–",
        )
    notes = [
        f"Load 1 is the fair share: ▁ under 0.5, ▄ to 1, ▅ from 1, █ from 2 (thirds of an octave); "
        f"○ starved, under {STARVED}; × dead, no token."
    ]
    if group > 1:
        notes.append(f"A mark stands for {group} experts and shows the one furthest from its fair share.")
    if len(layers) > len(shown):
        rest = max(layer.max_load for layer in layers if layer not in worst_first)
        notes.append(f"{len(layers) - len(shown)} more layers, highest load {rest:.2f} ×, are in the page.")
    return _section("Routing", Text(facts.routing_summary(report)), Text(), table, Text(" ".join(notes), style="dim"))


def _heat_row(layer: LayerLoad, *, group: int) -> str:
    marks = []
    for begin in range(0, len(layer.load), group):
        experts = range(begin, min(begin + group, len(layer.load)))
        marks.append(_load_mark(max((layer.load[expert] for expert in experts), key=_distance)))
    return "".join(marks)


def _distance(load: float) -> float:
    return abs(math.log2(load)) if load > 0 else math.inf


def _load_mark(load: float) -> str:
    """A block on a scale of thirds of an octave with 1 in its middle."""
    if load == 0:
        return "×"
    return "○" if load < STARVED else _BLOCKS[min(7, max(0, math.floor(3 * math.log2(load)) + 4))]


def _checkpoints(report: Report) -> list[RenderableType]:
    table = _table(["step", "size", "time", "best", "path"], words=["path"])
    for save in report.saves[-6:]:
        best = "best" if save.step == report.best_step else ""
        table.add_row(units.count(save.step), units.memory(save.bytes), units.duration(save.seconds), best, save.path)
    hidden = len(report.saves) - 6
    note = Text(f"{units.plural(hidden, 'earlier checkpoint')} not shown", style="dim") if hidden > 0 else None
    return _section("Checkpoints", table, note) if report.saves else []


def _answers(report: Report) -> list[RenderableType]:
    content: list[RenderableType] = []
    shared = len(facts.shared_beginning(report.answers))
    for answer in report.answers[:_ANSWERS_SHOWN]:
        pairs = [("prompt", answer.prompt[shared:]), ("expected", answer.expected)]
        pairs += [
            (when, said) for when, said in (("before", answer.before), ("after", answer.after)) if said is not None
        ]
        table = _facts([(label, units.shorten(said, 200)) for label, said in pairs])
        content += [table] if table and not content else [Text(), table] if table else []
    return _section("Answers to held-out rows", *content)


def _unread(report: Report) -> list[RenderableType]:
    return _section(
        "In events.jsonl, but not used", _facts((what, f"{times:,} ×") for what, times in report.unread.items())
    )
