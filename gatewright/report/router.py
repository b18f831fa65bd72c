"""What the report says of the router: its health at step 0 and now, over time, and what the guard did."""

import math
from collections.abc import Callable, Sequence

from gatewright.report import units
from gatewright.report.charts import Curve, line_chart, linear_scale, table
from gatewright.report.summary import Report
from gatewright.spec.event import RouterHealth

Row = tuple[str, str, str]
"""Quantity, at step 0, at the last look."""


def health_rows(report: Report) -> list[Row]:
    """The quantities by which the guard judges; means over layers, counts over all experts."""
    if not report.looks:
        return []
    first, last = report.looks[0], report.looks[-1]
    return [(name, text(first), text(last)) for name, text in _QUANTITIES]


def guard_rows(report: Report) -> list[tuple[str, str, str, str, str]]:
    """Step, level, action, what it changed, and why."""
    return [(units.count(a.step), a.level, a.action, a.detail, "; ".join(a.reasons)) for a in report.guard]


def router_html(report: Report) -> str:
    """The section of the page; empty where nobody looked at a router."""
    if not report.looks:
        return ""
    last = report.looks[-1]
    content = table(
        ["router, on a fixed probe", "at step 0", f"at step {units.count(last.step)}"],
        health_rows(report),
        words=["router, on a fixed probe"],
    )
    if len(report.looks) > 1:
        moved = _chart(report, "kl", "Distance from step 0", "KL of the routing, nats, mean over layers", _mean_of_kl)
        starved = _chart(report, "starved", "Starved experts", "with less than a tenth of their share", _starved)
        content += f'<div class="pair">{moved}{starved}</div>'
    if report.guard:
        columns = ["step", "level", "action", "what changed", "why"]
        content += table(columns, guard_rows(report), words=columns[1:])
    return content


def _chart(report: Report, key: str, title: str, unit: str, value: Callable[[RouterHealth], float]) -> str:
    steps, values = [look.step for look in report.looks], [value(look) for look in report.looks]
    curve = Curve(label=title, look="only", steps=steps, values=values)
    return line_chart(
        [curve],
        key=f"router-{key}",
        title=title,
        unit=unit,
        about=f"{title} at {len(report.looks)} looks.",
        y=linear_scale(values, zero=True),
        last_step=max(report.steps_done, *curve.steps),
        restarts=report.restarts,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_of_kl(look: RouterHealth) -> float:
    return _mean(look.kl)


def _starved(look: RouterHealth) -> float:
    return float(sum(look.starved))


_QUANTITIES: list[tuple[str, Callable[[RouterHealth], str]]] = [
    ("dead experts", lambda look: units.count(sum(look.dead))),
    ("starved experts", lambda look: units.count(sum(look.starved))),
    ("load CV, worst layer", lambda look: units.decimal(max(look.load_cv), digits=2)),
    ("choices as at step 0", lambda look: units.share(_mean(look.overlap))),
    ("KL from step 0, nats", lambda look: units.decimal(_mean(look.kl), digits=3)),
    ("token entropy", lambda look: units.decimal(_mean(look.token_entropy), digits=2)),
    ("largest probability", lambda look: units.decimal(_mean(look.top1), digits=2)),
    ("logsumexp²", lambda look: units.decimal(_mean(look.lse2), digits=2)),
    ("drift of the weight", lambda look: units.decimal(max(look.drift), digits=3)),
]
