"""An out-of-memory failure beside the plan of the run: what was expected, what was there, which parts are largest."""

from dataclasses import replace

from gatewright.doctor.oom_cause import size
from gatewright.spec.finding import Finding
from gatewright.spec.plan import MemoryEstimate, Phase, PhaseName

PHASES: dict[str, PhaseName] = {
    "load": "load",
    "loss": "loss",
    "forward": "loss",
    "backward": "backward",
    "optimizer": "step",
    "save": "save",
}
"""Phase of a traceback → phase of the plan. The plan's forward pass ends with the loss."""
_PARTS_SHOWN = 3


def beside_plan(found: Finding, planned: MemoryEstimate) -> Finding:
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
    return replace(found, text=text, numbers=numbers)


def _phase(planned: MemoryEstimate, name: str) -> Phase:
    """The planned phase that the failure fell into; the largest one where the log does not tell."""
    wanted = PHASES.get(name)
    return next((phase for phase in planned.phases if phase.name == wanted), planned.peak)
