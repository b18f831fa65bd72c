"""A plan as plain text of at most 100 columns: the answer in the first line, then what it rests on."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from gatewright.spec.hardware import GB, GIB, Gpu
from gatewright.spec.plan import PHASE_TITLES, Candidate, CostEstimate, Knob, MemoryEstimate, Phase, Plan, TimeEstimate

WIDTH = 100
BAR = 44
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("█", "weights", ("frozen weights", "trained weights", "reference model", "whole checkpoint")),
    ("▓", "adapters, optimizer", ("adapters", "optimizer state", "optimizer temporaries")),
    ("▒", "gradients", ("gradients", "gradient buffer", "gradient of the head", "gradients in flight")),
    (
        "▚",
        "buffers",
        (
            "gathered weights",
            "gathered adapters",
            "dequantised weights",
            "experts of the block",
            "communication buckets",
        ),
    ),
    ("░", "activations, loss", ()),
)
"""Signs of the stacked bar; the last takes every part the others do not name."""


LEGEND = " ".join(f"{sign} {name}" for sign, name, _ in GROUPS)


def render_plan(plan: Plan, *, explain: bool = False) -> str:
    """The page a person reads; `explain` adds each part's formula with numbers put in."""
    lines = [headline(plan), "", *subject(plan)]
    chosen = plan.chosen
    if chosen is not None and chosen.memory is not None:
        lines += ["", *memory_lines(plan, chosen.memory)]
        if chosen.time is not None:
            lines += ["", *time_lines(chosen.time, chosen.cost)]
        lines += wrapped("why", chosen.reasons)
    if plan.alternatives:
        lines += ["", "also fits", *(candidate_line(plan, item) for item in plan.alternatives)]
    if plan.rejected:
        lines += ["", "does not" if chosen else "closest", *misses(plan.rejected)]
    if plan.knobs and (chosen is None or is_tight(plan)):
        lines += ["", "would take off", *(knob_line(knob) for knob in plan.knobs)]
    if explain and chosen is not None and chosen.memory is not None:
        lines += ["", *explanation(chosen.memory)]
    lines += wrapped("notes", plan.notes)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def is_tight(plan: Plan) -> bool:
    """The upper end of the chosen layout's range is more than the GPU has."""
    memory = plan.chosen.memory if plan.chosen else None
    return memory is not None and memory.device.high_bytes > plan.gpu_memory_bytes


def knob_line(knob: Knob) -> str:
    change = f"{knob.setting}: {knob.was} → {knob.value}"
    return f"  {change:<48s}{gib(knob.saved_bytes):>8s} GiB, {gib(knob.device_bytes)} left"


def headline(plan: Plan) -> str:
    """`fits: 2 × h200, 118.4 GiB of 139.7 at the loss, 9.1 GiB head-room`, or what is too much and what would do."""
    if plan.chosen is None or plan.chosen.memory is None:
        enough = f"; {plan.fewest_gpus} would do" if plan.fewest_gpus else ""
        return f"does not fit: {plan.gpus} × {plan.gpu}{shortage(plan)}{enough}"
    memory = plan.chosen.memory
    room = plan.gpu_memory_bytes - memory.device.bytes
    tight = ", tight" if is_tight(plan) else ""
    return (
        f"fits: {plan.gpus} × {plan.gpu}, {gib(memory.device.bytes)} GiB of {gib(plan.gpu_memory_bytes)} at the "
        f"{PHASE_TITLES[memory.peak.name]}, {gib(room)} GiB head-room{tight}"
    )


def shortage(plan: Plan) -> str:
    """How much the nearest layout lacks, or which rule stands in the way."""
    nearest = next((item for item in plan.rejected if item.memory is not None), None)
    if nearest is not None and nearest.memory is not None:
        memory = nearest.memory
        place = PHASE_TITLES[memory.peak.name]
        return f", {gib(memory.device.bytes)} GiB of {gib(plan.capacity_bytes)} usable at the {place}"
    rule = next((item.refusals[0].rule for item in plan.rejected if item.refusals), "")
    return f", refused by {rule}" if rule else ""


def subject(plan: Plan) -> list[str]:
    share = plan.trainable_parameters / plan.parameters
    lines = [
        f"model     {plan.model}, {count(plan.parameters)} parameters",
        f"method    {plan.method}: {count(plan.trainable_parameters)} parameters train ({share:.3%})",
    ]
    if plan.chosen is not None:
        fewest = f"; fewest that fit: {plan.fewest_gpus}" if plan.fewest_gpus else ""
        lines.append(f"layout    {plan.chosen.layout}{fewest}")
    return [row for line in lines for row in textwrap.wrap(line, WIDTH, subsequent_indent=" " * 10)]


def memory_lines(plan: Plan, memory: MemoryEstimate) -> list[str]:
    """A stacked bar a phase on one scale, the largest parts of the peak, and the three metrics."""
    fullest = max(phase.bytes for phase in memory.phases)
    scale = max(fullest, plan.gpu_memory_bytes)
    lines = [f"per rank, GiB: {LEGEND}"]
    for phase in memory.phases:
        mark = " peak" if phase is memory.peak else ""
        lines.append(f"  {phase.name:9s}{gib(phase.bytes):>8s}  {bar(phase, scale)}{mark}")
    parts = sorted(memory.peak.parts, key=lambda part: -part.bytes)
    shown = [f"{part.name} {gib(part.bytes)}" for part in parts if part.bytes >= 0.005 * GIB]
    lines += indented("at the peak: " + ", ".join(shown))
    for interval in (memory.allocated, memory.reserved, memory.device):
        low, high = gib(interval.low_bytes), gib(interval.high_bytes)
        lines.append(f"  {interval.metric:9s}{gib(interval.bytes):>8s}  {low} to {high} GiB in nine runs of ten")
    return lines


def bar(phase: Phase, scale: int) -> str:
    """One character a share of `scale`; rounding never lets the bar grow past it."""
    drawn, total = "", 0
    for (sign, _, _), size in zip(GROUPS, group_sizes(phase), strict=True):
        total += size
        drawn += sign * (round(total / scale * BAR) - len(drawn))
    return drawn + "·" * (BAR - len(drawn))


def group_sizes(phase: Phase) -> list[int]:
    """Bytes of each of GROUPS."""
    return [sum(part.bytes for part in phase.parts if group_of(part.name) == index) for index in range(len(GROUPS))]


def group_of(name: str) -> int:
    return next((index for index, (_, _, names) in enumerate(GROUPS) if name in names), len(GROUPS) - 1)


def time_lines(time: TimeEstimate, cost: CostEstimate | None) -> list[str]:
    rate = time.tokens_per_s
    lines = [
        f"step      {seconds(time.step_s)} for {time.tokens_per_step:,} tokens, {rate:,.0f} tokens/s",
        *indented(", ".join(f"{name} {seconds(value)}" for name, value in time.terms if value >= 0.005 * time.step_s)),
        *indented(efficiency_text(time)),
    ]
    lines.append("cost      give --hours or --steps" if cost is None else cost_line(cost))
    return lines


def efficiency_text(time: TimeEstimate) -> str:
    share = f"{time.efficiency:.2g}" if time.efficiency < 0.01 else f"{time.efficiency:.0%}"
    if time.efficiency_source.startswith("measured"):
        return f"{share} of the peak bf16 rate, {time.efficiency_source}"
    return f"assumed: {share} of the peak bf16 rate ({time.efficiency_source}); --calibrate puts a measured one in"


def cost_line(cost: CostEstimate) -> str:
    """`cost      2,615 $ for 72.0 h × 8 GPUs × 4.54 $ …`; without a price, only GPU-hours."""
    if cost.usd is None or cost.usd_per_gpu_hour is None:
        return f"cost      {cost.gpu_hours:,.0f} GPU-hours; {cost.price_source}"
    dated = f", {cost.price_date}" if cost.price_date else ""
    text = (
        f"cost      {cost.usd:,.0f} $ for {cost.hours:.1f} h × {cost.gpus} GPU{'s' * (cost.gpus > 1)} × "
        f"{cost.usd_per_gpu_hour:.2f} $ "
        f"({cost.price_source}{dated})"
    )
    return text if len(text) <= WIDTH else text[: WIDTH - 2] + "…)"


def candidate_line(plan: Plan, item: Candidate) -> str:
    assert item.memory is not None and item.time is not None
    price = f" {dollars(item.cost.usd):>10s}" if item.cost is not None and item.cost.usd is not None else ""
    room = plan.gpu_memory_bytes - item.memory.device.bytes
    return (
        f"  {item.layout[:44]:44s} {gib(item.memory.device.bytes):>6s} GiB, {gib(room):>5s} free, "
        f"{seconds(item.time.step_s)} a step{price}"
    )


def misses(rejected: Iterable[Candidate]) -> list[str]:
    lines = []
    for item in rejected:
        refusal = next(iter(item.refusals), None)
        reason = f"{refusal.rule}: {refusal.reason}" if refusal else "; ".join(item.reasons)
        lines += indented(f"{item.layout}: {reason}")
    return lines


def explanation(memory: MemoryEstimate) -> list[str]:
    lines = ["formulas"]
    for phase in memory.phases:
        lines.append(f"  {phase.name}: {gib(phase.bytes)} GiB")
        for part in phase.parts:
            text = f"{part.name} {gib(part.bytes)} GiB" + (f" = {part.formula}" if part.formula else "")
            lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ")
    return lines


def indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def wrapped(title: str, sentences: Sequence[str]) -> list[str]:
    if not sentences:
        return []
    lines = ["", title]
    for sentence in sentences:
        lines += indented(sentence)
    return lines


def render_comparison(plans: Sequence[Plan]) -> str:
    """The cheapest method that fits in the first line, then a row a method, then a bar a method at its peak."""
    names = [plan.method.split(";")[0] for plan in plans]
    wide = max(map(len, names))
    lines = [comparison_headline(plans), "", f"{'':{min(wide, 42)}s}{COMPARED}"]
    for name, plan in zip(names, plans, strict=True):
        lines.append(f"{shortened(name, 42):{min(wide, 42)}s}{comparison_row(plan)}")
    memories = [item.memory for plan in plans if (item := shown_candidate(plan)) and item.memory]
    if memories:
        scale = max(max(memory.peak.bytes for memory in memories), plans[0].gpu_memory_bytes)
        lines += ["", f"at the peak: {LEGEND}"]
        for name, plan in zip(names, plans, strict=True):
            item = shown_candidate(plan)
            if item and item.memory:
                lines.append(f"  {shortened(name, 42):{min(wide, 42)}s}  {bar(item.memory.peak, scale)}")
    lines += wrapped("layouts", [f"{name}: {layout_text(plan)}" for name, plan in zip(names, plans, strict=True)])
    return "\n".join(line.rstrip() for line in lines) + "\n"


COMPARED = f"{'trains':>10s}{'GiB':>8s}{'head-room':>11s}{'fewest':>8s}{'a step':>10s}{'cost':>10s}"


def comparison_headline(plans: Sequence[Plan]) -> str:
    """`fits: lora, qlora; not full, on 8 × h200`."""
    fitting = [plan.method.split(" ")[0].lower() for plan in plans if plan.fits]
    failing = [plan.method.split(" ")[0].lower() for plan in plans if not plan.fits]
    where = ", ".join(dict.fromkeys(f"{plan.gpus} × {plan.gpu}" for plan in plans))
    if not fitting:
        return f"does not fit: {', '.join(failing)} on {where}"
    return f"fits: {', '.join(fitting)}{'; not ' + ', '.join(failing) if failing else ''}, on {where}"


def comparison_row(plan: Plan) -> str:
    item = shown_candidate(plan)
    memory = item.memory if item else None
    used = gib(memory.device.bytes) if memory else "-"
    room = gib(plan.gpu_memory_bytes - memory.device.bytes) if memory and plan.fits else "too large"
    step = seconds(item.time.step_s) if item and item.time else "-"
    usd = item.cost.usd if item and item.cost else None
    return (
        f"{count(plan.trainable_parameters):>10s}{used:>8s}{room:>11s}{plan.fewest_gpus or '-':>8}{step:>10s}"
        f"{'-' if usd is None else dollars(usd):>10s}"
    )


def shown_candidate(plan: Plan) -> Candidate | None:
    """The chosen layout, or the one that comes nearest to fitting."""
    return plan.chosen or next((item for item in plan.rejected if item.memory is not None), None)


def layout_text(plan: Plan) -> str:
    item = shown_candidate(plan)
    return item.layout if item else "no legal layout"


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def render_fewest(fewest: Sequence[tuple[Gpu, int | None]]) -> str:
    """How many kinds fit; then a line a GPU: the fewest, their memory together, dollars an hour where one is known."""
    lines = [*fewest_lines(fewest), ""]
    for gpu, gpus in fewest:
        if gpus is None:
            lines.append(f"{gpu.name:16s}   none of the sizes tried fits")
            continue
        price = gpu.price()
        hourly = f"{gpus * price.usd_per_hour:9,.2f} $/h ({price.kind}, {price.date})" if price else "   no price known"
        lines.append(f"{gpu.name:16s}{gpus:5d}  {gpus * gpu.memory_gib:8,.0f} GiB{hourly}")
    return "\n".join(lines) + "\n"


def fewest_lines(fewest: Sequence[tuple[Gpu, int | None]]) -> list[str]:
    """`fits: on 25 of 28 kinds of GPU; 1 × l4 is the cheapest an hour, 0.80 $`."""
    fitting = [(gpu, gpus) for gpu, gpus in fewest if gpus is not None]
    if not fitting:
        return [f"does not fit: none of {len(fewest)} kinds of GPU, in the numbers tried"]
    priced = [(gpus * price.usd_per_hour, gpu, gpus) for gpu, gpus in fitting if (price := gpu.price())]
    cheapest = min(priced, key=lambda item: item[0], default=None)
    best = f"; {cheapest[2]} × {cheapest[1].name} costs least an hour, {cheapest[0]:,.2f} $" if cheapest else ""
    return [f"fits: on {len(fitting)} of {len(fewest)} kinds of GPU{best}"]


def fewest_as_json(fewest: Sequence[tuple[Gpu, int | None]]) -> list[dict[str, Any]]:
    """A row a GPU; `gpus` is null where none of the numbers tried fits, `usd_per_hour` where no price is known."""
    rows = []
    for gpu, gpus in fewest:
        price = gpu.price()
        usd = gpus * price.usd_per_hour if price and gpus else None
        rows.append({"gpu": gpu.name, "gpus": gpus, "memory_bytes": gpu.memory_bytes, "usd_per_hour": usd})
    return rows


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values for `--json`, derived figures included; field names are those of spec/plan.py."""
    document = asdict(plan)
    document["fits"] = plan.fits
    for item, plain in zip(
        (plan.chosen, *plan.alternatives, *plan.rejected),
        (document["chosen"], *document["alternatives"], *document["rejected"]),
        strict=True,
    ):
        if item is None:
            continue
        if item.memory is not None:
            plain["memory"]["peak"] = item.memory.peak.name
        if item.time is not None:
            plain["time"]["step_s"] = item.time.step_s
            plain["time"]["tokens_per_s"] = item.time.tokens_per_s
        if item.cost is not None:
            plain["cost"]["usd"] = item.cost.usd
    return document


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def count(parameters: int) -> str:
    return f"{parameters / GB:.2f} B" if parameters >= GB else f"{parameters / 1e6:.2f} M"


def dollars(usd: float) -> str:
    return f"{usd:,.0f} $" if usd < 1e7 else f"{usd / 1e6:,.0f} M$"


def seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.2f} s" if value >= 0.095 else f"{value * 1000:.0f} ms"
