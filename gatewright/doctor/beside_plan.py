"""An out-of-memory failure beside the run's plan: what was expected, and what each setting is predicted to save."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gatewright.doctor.knobs import turned
from gatewright.doctor.oom_cause import size
from gatewright.spec.finding import Change, Finding, Number
from gatewright.spec.plan import Knob, MemoryEstimate, Phase, PhaseName, Plan
from gatewright.spec.read_plan import read_plan

NAME = "plan.json"
PHASES: dict[str, PhaseName] = {
    "load": "load",
    "loss": "loss",
    "forward": "loss",
    "backward": "backward",
    "optimizer": "step",
    "save": "save",
}
"""Phase of a traceback → phase of the plan. The plan's forward pass ends with the loss."""
FULL = frozenset({"pressure", "mixed", "unknown"})
"""Causes that less memory cures."""
USABLE = 0.98
"""Of a card; the rest is the driver's."""
_PARTS_SHOWN = 3
_KNOBS_SHOWN = 4


def find_plan(logs: Sequence[Path]) -> Plan | None:
    """The plan.json beside the logs, or in a folder that was given. Raises UserError for one that cannot be read."""
    for log in logs:
        path = (log if log.is_dir() else log.parent) / NAME
        if path.is_file():
            return read_plan(path)
    return None


def beside_plan(found: Finding, planned: MemoryEstimate, knobs: Sequence[Knob] = (), *, tool: str = "") -> Finding:
    """The finding with the plan's numbers; unchanged where the log has none to compare, or it is another failure."""
    allocated, tried = found.number.get("allocated_bytes"), found.number.get("tried_bytes")
    if not isinstance(allocated, int) or not isinstance(tried, int):
        return found
    phase = _phase(planned, str(found.number.get("phase", "")))
    largest = sorted(phase.parts, key=lambda part: part.bytes, reverse=True)[:_PARTS_SHOWN]
    parts = ", ".join(f"{part.name} {size(part.bytes)}" for part in largest)
    estimate = planned.allocated
    wanted = allocated + tried
    verdict = "more than" if wanted > estimate.high_bytes else "within" if wanted >= estimate.low_bytes else "less than"
    text = (
        f"{found.text} The plan expected {size(estimate.bytes)} allocated ({size(estimate.low_bytes)} to "
        f"{size(estimate.high_bytes)}); {size(wanted)} were live or asked for, {verdict} that. Largest parts planned "
        f"for the phase {phase.name}: {parts}."
    )
    numbers = (*found.numbers, ("planned_allocated_bytes", estimate.bytes), ("planned_phase_bytes", phase.bytes))
    told = replace(found, text=text, numbers=numbers)
    if found.number.get("cause") not in FULL:
        return told
    return with_knobs(told, knobs, tool=tool, excess_bytes=max(0, wanted - estimate.bytes))


def with_knobs(found: Finding, knobs: Sequence[Knob], *, tool: str, excess_bytes: int) -> Finding:
    """Each setting with the bytes it is predicted to save, before the advice that has no numbers.

    `excess_bytes`: what was live or asked for beyond the plan; a prediction is off by as much.
    """
    turns = [(knob, change) for knob in knobs if (change := turned(tool, knob)) is not None][:_KNOBS_SHOWN]
    if not turns:
        return found
    total = found.number.get("total_bytes")
    card = total if isinstance(total, int) else None
    numbers: list[tuple[str, Number]] = [(f"{change.setting} saves_bytes", knob.saved_bytes) for knob, change in turns]
    settings = {change.setting for _, change in turns}
    return replace(
        found,
        fix=(*(sentence(knob, change, card, excess_bytes) for knob, change in turns), *found.fix),
        changes=(
            *(change for _, change in turns),
            *(change for change in found.changes if change.setting not in settings),
        ),
        numbers=(*found.numbers, *numbers),
    )


def sentence(knob: Knob, change: Change, card_bytes: int | None, excess_bytes: int) -> str:
    """`train.checkpointing: full is predicted to take 24.5 GiB off; 72.1 GiB would fit the card's 79.1 GiB.`"""
    left = knob.device_bytes + excess_bytes
    text = f"{change.setting}: {change.value} is predicted to take {size(knob.saved_bytes)} off"
    if card_bytes is None:
        return f"{text}; {size(left)} would be left."
    fits = "would fit" if left <= USABLE * card_bytes else "would still be too much for"
    return f"{text}; the {size(left)} that are left {fits} the card's {size(card_bytes)}."


def _phase(planned: MemoryEstimate, name: str) -> Phase:
    """The planned phase that the failure fell into; the largest one where the log does not tell."""
    wanted = PHASES.get(name)
    return next((phase for phase in planned.phases if phase.name == wanted), planned.peak)
