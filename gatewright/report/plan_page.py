"""Plans as one page that stands alone: memory by phase and part, time, cost, and the layouts beside the chosen one."""

from collections.abc import Sequence
from html import escape

from gatewright.report import units
from gatewright.report.charts import share_bar, table
from gatewright.report.page import page
from gatewright.report.plan_text import (
    GROUPS,
    comparison_headline,
    cost_line,
    count,
    efficiency_text,
    gib,
    group_of,
    group_sizes,
    headline,
    layout_text,
    seconds,
    shown_candidate,
)
from gatewright.spec.hardware import GIB
from gatewright.spec.plan import PHASE_TITLES, Candidate, Interval, MemoryEstimate, Phase, Plan

COLOURS = (0, 1, 2, 4, 3)
"""Of GROUPS, as places of the style sheet's palette."""


def render_page(plans: Sequence[Plan]) -> str:
    """The page as text; every word that came from outside is escaped."""
    if len(plans) == 1:
        return page(
            title=f"{plans[0].model} · {headline(plans[0])}", body=header(plans[0]) + sections(plans[0], level=2)
        )
    first = comparison_headline(plans)
    lead = f'<header><h1>{escape(plans[0].model)}</h1><p class="lead">{escape(first)}</p></header>'
    bodies = "".join(
        f"<h2>{escape(plan.method.split(';')[0])}</h2>{cards(plan)}{sections(plan, level=3)}" for plan in plans
    )
    return page(title=f"{plans[0].model} · {first}", body=f"{lead}<h2>Methods</h2>{comparison(plans)}{bodies}")


def header(plan: Plan) -> str:
    kind, state = ("finished", "fits") if plan.fits else ("failed", "does not fit")
    lead = f"{count(plan.parameters)} parameters · {plan.method} · {count(plan.trainable_parameters)} train"
    notice = f'<p class="notice {kind}">{escape(headline(plan))}</p>' if not plan.fits else ""
    return (
        f'<header><h1>{escape(plan.model)}<span class="state {kind}">{state}</span></h1>'
        f'<p class="lead">{escape(lead)}</p>{notice}</header>{cards(plan)}'
    )


def cards(plan: Plan) -> str:
    item = shown_candidate(plan)
    memory = item.memory if item else None
    shown = []
    if memory is not None:
        device = memory.device
        room = plan.gpu_memory_bytes - device.bytes
        interval = f"{gib(device.low_bytes)} to {gib(device.high_bytes)} in nine runs of ten"
        shown.append((f"Of {gib(plan.gpu_memory_bytes)} GiB a GPU", f"{gib(device.bytes)} GiB", interval))
        if plan.fits:
            shown.append(("Head-room", f"{gib(room)} GiB", f"fullest at the {PHASE_TITLES[memory.peak.name]}"))
    if item is not None and item.time is not None:
        rate = f"{item.time.tokens_per_s:,.0f} tokens a second"
        shown.append(("A step", seconds(item.time.step_s), rate))
    if item is not None and item.cost is not None and item.cost.usd is not None:
        hours = cost_line(item.cost).partition(" for ")[2].split(" (")[0]
        shown.append(("Cost", f"{item.cost.usd:,.0f} $", hours))
    if plan.fewest_gpus:
        shown.append(("Fewest that fit", f"{plan.fewest_gpus} × {plan.gpu}", ""))
    body = "".join(
        f'<div class="card"><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd>{escape(remark)}</dd></div>'
        for label, value, remark in shown[:4]
    )
    return f'<dl class="cards">{body}</dl>' if body else ""


def sections(plan: Plan, *, level: int) -> str:
    item = shown_candidate(plan)
    parts = {"Layout": layout(plan)}
    if item is not None and item.memory is not None:
        parts["Memory"] = memory_bars(plan, item.memory) + intervals(item.memory) + formulas(item.memory)
    if item is not None and item.time is not None:
        parts["Time and cost"] = clock(item)
    parts["Other layouts that fit"] = alternatives(plan)
    parts["Layouts that fail" if plan.fits else "Nearest layouts"] = misses(plan)
    parts["Notes"] = sentences(plan.notes)
    return "".join(f"<h{level}>{title}</h{level}>{body}" for title, body in parts.items() if body)


def layout(plan: Plan) -> str:
    return f"<p>{escape(layout_text(plan))}</p>{sentences(plan.chosen.reasons if plan.chosen else ())}"


def sentences(lines: Sequence[str]) -> str:
    rows = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="findings">{rows}</ul>' if rows else ""


def memory_bars(plan: Plan, memory: MemoryEstimate) -> str:
    """A stacked bar a phase on one scale, and what the colours mean at the peak."""
    scale = max(plan.gpu_memory_bytes, *(phase.bytes for phase in memory.phases))
    rows = "".join(
        f"<dt>{escape(PHASE_TITLES[phase.name])}{', the peak' if phase is memory.peak else ''}</dt>"
        f"<dd>{stacked(phase, scale)}<b>{gib(phase.bytes)}</b></dd>"
        for phase in memory.phases
    )
    at_peak = zip(COLOURS, GROUPS, group_sizes(memory.peak), strict=True)
    keys = "".join(
        f'<li class="key-part{colour}">{escape(name)} <b>{gib(size)} GiB</b></li>'
        for colour, (_, name, _), size in at_peak
    )
    note = f"GiB allocated on the fullest rank; a full bar is {scale / GIB:.1f}. Sizes below are those at the peak."
    bars = f'<dl class="fills">{rows}</dl><p class="note">{note}</p>'
    return f'<figure>{bars}<ul class="parts">{keys}</ul></figure>'


def stacked(phase: Phase, scale: int) -> str:
    boxes, left = ['<rect class="slots" width="1000" height="100"/>'], 0.0
    for colour, (_, name, _), size in zip(COLOURS, GROUPS, group_sizes(phase), strict=True):
        width = 1000 * size / scale
        title = f"<title>{escape(name)} {gib(size)} GiB</title>"
        if size:
            boxes.append(f'<rect class="part{colour}" x="{left:.1f}" width="{width:.1f}" height="100">{title}</rect>')
        left += width
    about = escape(f"{PHASE_TITLES[phase.name]}: {gib(phase.bytes)} GiB")
    return (
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{about}">{"".join(boxes)}</svg>'
    )


def intervals(memory: MemoryEstimate) -> str:
    rows = [interval_row(item) for item in (memory.allocated, memory.reserved, memory.device)]
    columns = ["metric", "GiB", "low", "high", "what a tool shows"]
    return f'<div class="wide">{table(columns, rows, words=["metric", "what a tool shows"])}</div>'


def interval_row(interval: Interval) -> list[str]:
    shown = {
        "allocated": "torch.cuda.max_memory_allocated",
        "reserved": "torch.cuda.max_memory_reserved",
        "device": "nvidia-smi, rocm-smi",
    }[interval.metric]
    sizes = (interval.bytes, interval.low_bytes, interval.high_bytes)
    return [interval.metric, *(gib(size) for size in sizes), shown]


def formulas(memory: MemoryEstimate) -> str:
    """Every part of every phase, largest first, with the formula it came from."""
    blocks = []
    for phase in memory.phases:
        parts = sorted(phase.parts, key=lambda part: -part.bytes)
        rows = [[part.name, GROUPS[group_of(part.name)][1], gib(part.bytes), part.formula or "–"] for part in parts]
        columns = ["part", "group", "GiB", "formula"]
        blocks.append(
            f"<details><summary>{escape(PHASE_TITLES[phase.name])}: {gib(phase.bytes)} GiB, part by part</summary>"
            f'<div class="wide">{table(columns, rows, words=["part", "group", "formula"])}</div></details>'
        )
    return "".join(blocks)


def clock(item: Candidate) -> str:
    assert item.time is not None
    bar = share_bar(item.time.terms, key="step", title=f"Where the {units.duration(item.time.step_s)} of a step go")
    assumed = (
        f"{efficiency_text(item.time)}. "
        f"{item.time.tokens_per_step:,} tokens a step, {item.time.flops_per_step / 1e15:,.1f} PFLOP of the model's own."
    )
    cost = ""
    if item.cost is not None:
        line = cost_line(item.cost).removeprefix("cost").strip().split(" (")[0]
        dated = f", {item.cost.price_date}" if item.cost.price_date else ""
        cost = f'<p class="note">{escape(f"{line}. Price: {item.cost.price_source}{dated}.")}</p>'
    return f'{bar}<p class="note">{escape(assumed)}</p>{cost}'


def alternatives(plan: Plan) -> str:
    rows = []
    for item in plan.alternatives:
        assert item.memory is not None and item.time is not None
        usd = f"{item.cost.usd:,.0f} $" if item.cost and item.cost.usd is not None else "–"
        room = gib(plan.gpu_memory_bytes - item.memory.device.bytes)
        rows.append([item.layout, gib(item.memory.device.bytes), room, seconds(item.time.step_s), usd])
    columns = ["layout", "GiB", "head-room", "a step", "cost"]
    return f'<div class="wide">{table(columns, rows, words=["layout"])}</div>' if rows else ""


def misses(plan: Plan) -> str:
    rows = []
    for item in plan.rejected:
        refusal = next(iter(item.refusals), None)
        why = f"{refusal.rule}: {refusal.reason} ({refusal.backend})" if refusal else "; ".join(item.reasons)
        rows.append([item.layout, why])
    return f'<div class="wide">{table(["layout", "why"], rows, words=["layout", "why"])}</div>' if rows else ""


def comparison(plans: Sequence[Plan]) -> str:
    rows = []
    for plan in plans:
        item = shown_candidate(plan)
        memory, time = (item.memory, item.time) if item else (None, None)
        usd = item.cost.usd if item and item.cost else None
        rows.append(
            [
                plan.method.split(";")[0],
                count(plan.trainable_parameters),
                gib(memory.device.bytes) if memory else "–",
                gib(plan.gpu_memory_bytes - memory.device.bytes) if memory and plan.fits else "too large",
                str(plan.fewest_gpus or "–"),
                seconds(time.step_s) if time else "–",
                "–" if usd is None else f"{usd:,.0f} $",
                layout_text(plan),
            ]
        )
    columns = ["method", "trains", "GiB", "head-room", "fewest GPUs", "a step", "cost", "layout"]
    return f'<div class="wide">{table(columns, rows, words=["method", "layout"])}</div>'
