"""A simulated schedule as plain text of at most 100 columns: the answer in the first line, then what it rests on."""

import textwrap
from collections import Counter
from dataclasses import asdict
from typing import Any

from gatewright.report.units import memory, shorten
from gatewright.spec.schedule import ScheduleReport, SlotTime, StepReport

WIDTH = 100
SHOWN_SLOTS = 16


def render_schedule(report: ScheduleReport) -> str:
    lines = [headline(report), "", *subject(report), "", *comparison(report), "", *costs(report)]
    lines += ["", *micro_batches(report.steps[0]), "", *notes(report)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def headline(report: ScheduleReport) -> str:
    """`1.21× as fast as static CP 16: 6.92 s a step, 4.1 % above perfect balance`."""
    step, bound = mean_step_s(report), mean_bound_s(report)
    over = f"{seconds(step)} a step, {step / bound - 1:.1%} above perfect balance"
    static = static_s(report)
    if static is None:
        return over
    name, taken = static
    gain = taken / step
    return f"{gain:.2f}× as fast as {name}: {over}" if gain >= 1.005 else f"as fast as {name}: {over}"


def subject(report: ScheduleReport) -> list[str]:
    ones = "one" if report.empty_documents == 1 else "ones"
    empty = f", {report.empty_documents:,} empty {ones} left out" if report.empty_documents else ""
    model = f"{report.model}{' (default; --model changes it)' if report.model_is_default else ''}"
    room = f"{report.capacity_tokens:,} tokens a rank{' (default)' if report.capacity_is_default else ''}"
    tokens = sum(step.tokens for step in report.steps) / len(report.steps)
    rows = [
        (
            "data",
            f"{shorten(report.source, 60)}: {report.documents:,} documents, {report.tokens:,} tokens, "
            f"the longest {report.longest_tokens:,}{empty}",
        ),
        ("machine", f"{report.ranks} × {report.gpu}, {report.ranks_per_node} a node, {room}"),
        ("model", model),
        ("steps", f"{len(report.steps)} of {report.steps_in_file:,} simulated, {tokens:,.0f} tokens each on average"),
    ]
    return [line for name, text in rows for line in row(name, text)]


def comparison(report: ScheduleReport) -> list[str]:
    """Each candidate's mean step, where all steps tried it, beside the one that was taken."""
    step, bound = mean_step_s(report), mean_bound_s(report)
    taken = Counter(done.strategy for done in report.steps)
    lines = [f"{'schedule':<28}{'step':>10}{'beside ours':>14}"]
    for name in dict.fromkeys(name for done in report.steps for name, _ in done.candidates):
        tried = [dict(done.candidates)[name] for done in report.steps if name in dict(done.candidates)]
        if len(tried) == len(report.steps):
            mean = sum(tried) / len(tried)
            mark = f"   taken in {taken[name]} of {len(report.steps)}" if taken[name] else ""
            lines.append(f"{name:<28}{seconds(mean):>10}{mean / step:>13.3f}×{mark}")
    lines.append(f"{'perfect balance':<28}{seconds(bound):>10}{bound / step:>13.3f}×   a bound, not a schedule")
    return lines


def costs(report: ScheduleReport) -> list[str]:
    steps = report.steps
    moved = sum(step.exchanged_bytes for step in steps) / len(steps)
    solver = sum(step.solver_s for step in steps) / len(steps)
    total = mean_step_s(report)
    rows = [
        ("moved", f"{memory(moved)} of keys and values a step, {weighted(report, 'exchange'):.1%} of the ranks' time"),
        ("idle", f"{weighted(report, 'idle'):.1%} of the ranks' time, waits and fixed costs of micro-batches"),
        ("solver", f"{1000 * solver:,.0f} ms a step on one core, {solver / total:.1%} of it, beside the step before"),
    ]
    return [line for name, text in rows for line in row(name, text)]


def micro_batches(step: StepReport) -> list[str]:
    lines = [
        f"The first of these steps: {step.documents:,} documents, {seconds(step.step_s)}, {step.strategy}",
        f"{'micro-batch':<12}{'time':>10}{'tokens':>12}{'cut documents':>16}{'widest group':>15}{'idle':>9}",
    ]
    for number, slot in enumerate(step.slots[:SHOWN_SLOTS], start=1):
        lines.append(
            f"{number:<12}{seconds(slot.duration_s):>10}{slot.tokens:>12,}{slot.cut_documents:>16}"
            f"{slot.widest:>15}{idle(slot):>9.1%}"
        )
    if len(step.slots) > SHOWN_SLOTS:
        lines.append(f"and {len(step.slots) - SHOWN_SLOTS} more")
    return lines


def notes(report: ScheduleReport) -> list[str]:
    return row("rates", f"{report.rates_source}; a simulation, nothing was measured here")


def idle(slot: SlotTime) -> float:
    busy = sum(rank.busy_s for rank in slot.ranks)
    return 1 - busy / (slot.duration_s * len(slot.ranks)) if slot.duration_s else 0.0


def mean_step_s(report: ScheduleReport) -> float:
    return sum(step.step_s for step in report.steps) / len(report.steps)


def mean_bound_s(report: ScheduleReport) -> float:
    return sum(step.bound_s for step in report.steps) / len(report.steps)


def static_s(report: ScheduleReport) -> tuple[str, float] | None:
    """Best single CP size for all steps, and its mean step; None where no size was tried in all of them."""
    names = {name for step in report.steps for name, _ in step.candidates if name.startswith("static")}
    means = []
    for name in names:
        tried = [dict(step.candidates)[name] for step in report.steps if name in dict(step.candidates)]
        if len(tried) == len(report.steps):
            means.append((sum(tried) / len(tried), name))
    if means:
        best, name = min(means)
        return name, best
    each = [step.static for step in report.steps]
    found = [static[1] for static in each if static is not None]
    return ("the best static CP of each step", sum(found) / len(found)) if len(found) == len(each) else None


def weighted(report: ScheduleReport, what: str) -> float:
    """A share of the ranks' time, over all steps."""
    shares = {"idle": [step.idle for step in report.steps], "exchange": [step.exchange for step in report.steps]}[what]
    times = [step.step_s for step in report.steps]
    return sum(share * time for share, time in zip(shares, times, strict=True)) / sum(times)


def row(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name:<10}{text}", WIDTH, subsequent_indent=" " * 10)


def seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def as_json(report: ScheduleReport) -> dict[str, Any]:
    """The report without the ranks of each micro-batch, and with what the text computes from it."""
    document = asdict(report)
    for step, made in zip(document["steps"], report.steps, strict=True):
        step |= {"idle": made.idle, "exchange": made.exchange, "candidates": dict(made.candidates)}
        for shown, slot in zip(step["slots"], made.slots, strict=True):
            shown["idle"] = idle(slot)
            del shown["ranks"]
    static = static_s(report)
    return document | {
        "step_s": mean_step_s(report),
        "bound_s": mean_bound_s(report),
        "static": None if static is None else {"name": static[0], "step_s": static[1]},
        "idle": weighted(report, "idle"),
        "exchange": weighted(report, "exchange"),
    }
