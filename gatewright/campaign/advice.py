"""What would fit, when a run cannot finish in the time it has: more links, fewer steps, packing, more nodes."""

import math
from pathlib import Path
from typing import Any

from gatewright.planner.plan_run import plan_run
from gatewright.report.units import duration
from gatewright.spec.campaign import Stage
from gatewright.spec.errors import GatewrightError
from gatewright.spec.read import read_run
from gatewright.spec.run import Run

ROOM = 1.08
"""Links asked for beyond the estimate: step times vary."""
NODE_FACTORS = (2, 4, 8, 16)


def advise(gate: dict[str, Any], stage: Stage) -> tuple[str, ...]:
    """Lines for a GateChecked event that said no, the cheapest change first."""
    step, steps, step_s = int(gate["step"]), int(gate["steps"]), float(gate["step_s"])
    needed_s, left_s, link_s = float(gate["needed_s"]), float(gate["left_s"]), float(gate["link_s"])
    lines = [
        f"hopeless at step {step}: {steps - step:,} steps at {step_s:.3g} s, with their evaluations and saves, need "
        f"{duration(needed_s)}; the links that are left have {duration(left_s)}"
    ]
    links = stage.links + math.ceil(max(0.0, ROOM * needed_s - left_s) / link_s) if link_s > 0 else None
    if links is not None:
        lines.append(
            f"  would fit: cluster.links: {links} (now {stage.links}), then submit again: it goes on from here"
        )
    fitting = step + int((steps - step) * left_s / (ROOM * needed_s)) if needed_s > 0 else steps
    if fitting > step:
        lines.append(f"  would fit: train.steps: {fitting} (now {steps}), as a run of another name")
    if stage.run_file is not None:
        lines += _from_planner(Path(stage.run_file), step_s=step_s, needed_s=needed_s, left_s=left_s)
    return tuple(lines)


def _from_planner(run_file: Path, *, step_s: float, needed_s: float, left_s: float) -> list[str]:
    """Packing where it is off, and the fewest nodes with which the planner sees the measured step get fast enough."""
    try:
        run = read_run(run_file)
        packing = [] if run.data.pack else ["  would help: data.pack: true; micro-batches then hold what fits in them"]
        if run.hardware is None or (now_s := _planned_step_s(run, nodes=run.hardware.nodes)) is None:
            return packing
        for nodes in (run.hardware.nodes * factor for factor in NODE_FACTORS):
            then_s = _planned_step_s(run, nodes=nodes)
            if then_s is not None and ROOM * needed_s * then_s / now_s <= left_s:
                said = f"the planner sees steps of {step_s * then_s / now_s:.3g} s there"
                return [*packing, f"  would fit: hardware.nodes: {nodes} (now {run.hardware.nodes}): {said}"]
        return packing
    except GatewrightError:
        return []


def _planned_step_s(run: Run, *, nodes: int) -> float | None:
    assert run.hardware is not None
    plan = plan_run(run, gpus=nodes * run.hardware.per_node)
    return plan.chosen.time.step_s if plan.chosen is not None and plan.chosen.time is not None else None
