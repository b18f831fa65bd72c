"""Charts as inline SVG: curves over the steps and bars of shares.

A drawing stretches with the page (preserveAspectRatio none, strokes that do not scale); its words are HTML placed
by percentages, so they keep their size on a phone. Coordinates inside: 0–1000 to the right, 0–100 down.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from gatewright.report import units


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values over the steps; NaN leaves a gap."""

    label: str
    look: str
    """CSS class: only, raw (pale, behind a smooth one), smooth or points."""
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float] = ()
    """With `high`: a band around the curve."""
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A range of numbers and the ticks in it; log: decades."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_scale(values: Iterable[float], *, zero: bool, ticks: int = 5) -> Scale:
    """A range around the finite values that ends on ticks; ticks are 1, 2 or 5 times a power of ten apart."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 1.0
        low, high = (low if zero else low - margin), high + margin
    power = 10 ** math.floor(math.log10((high - low) / ticks))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(low=first * step, high=last * step, ticks=tuple(tick * step for tick in range(first, last + 1)))


def log_scale(values: Iterable[float]) -> Scale:
    """Whole decades around the positive finite values."""
    positive = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    last = max(last, first + 1)
    every = max(1, (last - first) // 5)
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Scale(low=10.0**first, high=10.0**last, ticks=ticks, log=True)


def step_scale(last_step: int) -> Scale:
    """The axis of steps, from 0 to the last one; its ticks are whole."""
    wanted = linear_scale([0, max(last_step, 1)], zero=True, ticks=6)
    ticks = tuple(tick for tick in wanted.ticks if tick <= last_step and tick == round(tick))
    return Scale(low=0, high=max(last_step, 1), ticks=ticks or (0.0,))


def line_chart(
    curves: Sequence[Curve],
    *,
    key: str,
    title: str,
    unit: str,
    about: str,
    y: Scale,
    last_step: int,
    restarts: Sequence[int] = (),
    not_finite: Sequence[int] = (),
    format_y: str = "decimal",
    note: str = "",
) -> str:
    """A figure with the curves over the steps, a legend if there are two, and their numbers as a table."""
    x = step_scale(last_step)
    drawing = [f'<path class="grid" d="{"".join(f"M0 {_y(y, tick)}h1000" for tick in y.ticks)}"/>']
    drawing += [f'<path class="restart" d="M{_x(x, step)} 0v100"/>' for step in restarts]
    for curve in curves:
        drawing += _draw(curve, x=x, y=y)
    marks = [_word("mark", x.place(step), None, "restart") for step in restarts[:6]]
    marks += [_word("lost", x.place(step), None, "×") for step in not_finite[:50]]
    ticks_y = "".join(_word("y", None, y.place(tick), _tick(tick, y, format_y)) for tick in y.ticks)
    ticks_x = "".join(_word("x", x.place(tick), None, units.count(tick)) for tick in x.ticks)
    data = {
        "high": x.high,
        "unit": format_y,
        "lines": [
            {
                "label": curve.label,
                "x": list(curve.steps),
                "y": _numbers(curve.values),
                "low": _numbers(curve.low),
                "high": _numbers(curve.high),
            }
            for curve in curves
        ],
    }
    return (
        f'<figure class="chart" id="{key}"><figcaption><b>{escape(title)}</b> <span>{escape(unit)}</span></figcaption>'
        f"{_legend(curves, not_finite=not_finite)}"
        f'<div class="plot">{_svg("".join(drawing), key=key, title=title, about=about)}'
        f"{ticks_y}{ticks_x}{''.join(marks)}</div>"
        f"{json_block(data)}{_note(note)}{_table(curves, format_y=format_y)}</figure>"
    )


def _draw(curve: Curve, *, x: Scale, y: Scale) -> list[str]:
    if curve.look == "points":
        places = zip(curve.steps, curve.values, strict=True)
        dots = "".join(f"M{_x(x, step)} {_y(y, value)}h.01" for step, value in places if math.isfinite(value))
        size = "points" if len(curve.steps) <= 40 else "points small"
        return [f'<path class="points-line" d="{_path(curve, x=x, y=y)}"/><path class="{size}" d="{dots}"/>']
    parts = []
    if curve.low and any(low < high for low, high in zip(curve.low, curve.high, strict=True)):
        parts.append(f'<path class="band" d="{_band(curve, x=x, y=y)}"/>')
    look = "dot" if len(curve.steps) == 1 else curve.look
    return [*parts, f'<path class="{look}" d="{_path(curve, x=x, y=y)}"/>']


def _path(curve: Curve, *, x: Scale, y: Scale) -> str:
    parts, pen = [], "M"
    for step, value in zip(curve.steps, curve.values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        parts.append(f"{pen}{_x(x, step)} {_y(y, value)}" + ("h.01" if pen == "M" else ""))
        pen = "L"
    return "".join(parts)


def _band(curve: Curve, *, x: Scale, y: Scale) -> str:
    rows = list(zip(curve.steps, curve.low, curve.high, strict=True))
    parts = []
    for finite, run in groupby(rows, key=lambda row: math.isfinite(row[1])):
        if finite:
            points = list(run)
            there = [f"{_x(x, step)} {_y(y, high)}" for step, _, high in points]
            back = [f"{_x(x, step)} {_y(y, low)}" for step, low, _ in reversed(points)]
            parts.append(f"M{'L'.join([*there, *back])}z")
    return "".join(parts)


def _x(scale: Scale, step: float) -> str:
    return f"{1000 * scale.place(step):.1f}".removesuffix(".0")


def _y(scale: Scale, value: float) -> str:
    value = max(value, scale.low) if scale.log else value
    return f"{100 - 100 * scale.place(value):.2f}".removesuffix(".00")


def _word(kind: str, right: float | None, up: float | None, text: str) -> str:
    """A word at a share of the drawing's width or height."""
    place = f"left:{100 * right:.2f}%" if right is not None else f"bottom:{100 * (up or 0):.2f}%"
    return f'<span class="{kind}" style="{place}">{escape(text)}</span>'


def _tick(tick: float, scale: Scale, format_y: str) -> str:
    """A tick with as many digits as tell it from its neighbours; all of one axis in the same unit."""
    if tick == 0 or scale.log:
        return units.decimal(tick, digits=1)
    step = scale.ticks[1] - scale.ticks[0]
    if format_y == "memory":
        size, unit = units.binary_unit(scale.high)
        return f"{tick / size:.{_places(step / size)}f} {unit}"
    return f"{tick:,.{_places(step)}f}" if step >= 1e-3 else units.decimal(tick, digits=2)


def _places(step: float) -> int:
    """Digits after the point that a multiple of the step needs."""
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _legend(curves: Sequence[Curve], *, not_finite: Sequence[int]) -> str:
    items = [f'<li class="key-{curve.look}">{escape(curve.label)}</li>' for curve in curves]
    if not_finite:
        items.append(f'<li class="key-lost">not finite: {units.plural(len(not_finite), "step")}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>' if len(items) > 1 else ""


def _svg(drawing: str, *, key: str, title: str, about: str) -> str:
    return (
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(about)}</desc>{drawing}</svg>'
    )


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""


def _table(curves: Sequence[Curve], *, format_y: str, rows: int = 24) -> str:
    """The curves at some steps, evenly spread, the last one among them."""
    bodies = []
    for curve in curves:
        if curve.look == "smooth" or not curve.steps:
            continue
        every = max(1, -(-len(curve.steps) // rows))
        chosen = list(range(len(curve.steps) - 1, -1, -every))[::-1]
        columns = [curve.values] + ([curve.low, curve.high] if curve.low else [])
        heads = [curve.label] + (["lowest", "highest"] if curve.low else [])
        lines = [[units.count(curve.steps[i]), *(_value(column[i], format_y) for column in columns)] for i in chosen]
        bodies.append(table(["step", *heads], lines))
    return f'<details><summary>Numbers</summary><div class="wide">{"".join(bodies)}</div></details>'


def _value(value: float, format_y: str) -> str:
    return units.memory(value) if format_y == "memory" else units.decimal(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[str] = ()) -> str:
    """An HTML table of escaped cells; columns named in `words` are set left, the others as numbers."""
    kinds = [' class="w"' if name in words else "" for name in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def share_bar(parts: Sequence[tuple[str, float]], *, key: str, title: str) -> str:
    """One bar divided by the parts, (name, seconds), with a list of them under it; a part keeps its colour by place."""
    total = math.fsum(value for _, value in parts) or 1.0
    rects, rows, right = [], [], 0.0
    for place, (name, value) in enumerate(parts):
        if value <= 0:
            continue
        size = f'x="{1000 * right / total:.1f}" width="{1000 * value / total:.1f}" height="100"'
        rects.append(f'<rect class="part{place}" {size}/>')
        numbers = f"<b>{units.share(value / total)}</b> <span>{units.duration(value)}</span>"
        rows.append(f'<li class="key-part{place}">{escape(name)} {numbers}</li>')
        right += value
    about = ", ".join(f"{name} {units.share(value / total)}" for name, value in parts if value > 0)
    return (
        f'<figure class="shares" id="{key}"><figcaption><b>{escape(title)}</b></figcaption>'
        f'{_svg("".join(rects), key=key, title=title, about=about)}<ul class="parts">{"".join(rows)}</ul></figure>'
    )


def fill_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Bars of shares of one, each with its number and a remark."""
    lines = "".join(
        f'<dt>{escape(what)}</dt><dd><svg viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="slots" width="1000" height="100"/>'
        f'<rect class="fill{place}" width="{1000 * fill:.1f}" height="100"/>'
        f"</svg><b>{units.share(fill)}</b><span>{escape(remark)}</span></dd>"
        for place, (what, fill, remark) in enumerate(rows)
    )
    return f'<dl class="fills">{lines}</dl>'


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Four significant digits, None for what JSON cannot say."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def json_block(data: object) -> str:
    """Data for the page's script; no text in it can end the block."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
