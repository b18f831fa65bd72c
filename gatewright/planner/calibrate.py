"""A measured run instead of an assumed efficiency: its steps against the planner's own estimate of them."""

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gatewright.planner.job import Layout
from gatewright.planner.plan_run import ask_run, gpus_of
from gatewright.planner.time import Efficiency, calibrated
from gatewright.spec.errors import UserError
from gatewright.spec.read import read_run

WARM_UP_STEPS = 3
"""Kernels are compiled and memory is found in these."""
LEAST_STEPS = 3
"""That are left after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians over a run's steps."""

    steps: int
    step_s: float
    tokens: int
    device: str


def calibrate(folder: Path) -> Efficiency:
    """Share of the peak rate that the run in `folder` (run.yaml, events.jsonl) reached, by the planner's account.

    Raises UserError where there are too few steps, or the run does not say on which GPUs and in which layout it ran.
    """
    measured = read_steps(folder / "events.jsonl")
    if measured.device.lower().startswith("cpu"):
        raise UserError(f"{folder} ran on a CPU ({measured.device}): a GPU's efficiency cannot be read from it.")
    run = read_run(folder / "run.yaml")
    gpus = gpus_of(run)
    question = ask_run(run)
    if question.layout is None and gpus > 1:
        raise UserError(
            f"{folder}/run.yaml says parallel: auto on {gpus} GPUs, so the layout of its steps is not known; "
            "write the layout that ran, such as parallel: {ep: 8, dense: zero2}."
        )
    job = replace(question.job, layout=question.layout or Layout())
    known = calibrated(job, question.cluster(gpus), tokens_per_step=measured.tokens, measured_step_s=measured.step_s)
    return Efficiency(
        share=known.share,
        source=f"measured by {folder}: median of {measured.steps} steps, {measured.step_s:.2f} s for "
        f"{measured.tokens:,} tokens on {gpus} × {question.gpu.name}",
    )


def read_steps(path: Path) -> Measured:
    """Medians of time and tokens a step, the first few left out; a step that was done again counts once."""
    steps: dict[int, tuple[float, int]] = {}
    device = ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                event = parsed(line)
                if event.get("kind") == "start":
                    device = str(event.get("device", ""))
                elif event.get("kind") == "step" and is_step(event):
                    steps[int(event["step"])] = (float(event["step_s"]), int(event["tokens"]))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; --calibrate wants the folder of a run.") from None
    kept = [steps[step] for step in sorted(steps)][WARM_UP_STEPS:]
    if len(kept) < LEAST_STEPS:
        raise UserError(
            f"{path} holds {len(steps)} steps; wanted at least {WARM_UP_STEPS + LEAST_STEPS}, of which the first "
            f"{WARM_UP_STEPS} warm up."
        )
    return Measured(
        steps=len(kept),
        step_s=statistics.median(seconds for seconds, _ in kept),
        tokens=round(statistics.median(tokens for _, tokens in kept)),
        device=device,
    )


def parsed(line: str) -> dict[str, Any]:
    """An event; empty for a line that a killed process left unfinished."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def is_step(event: dict[str, Any]) -> bool:
    """Numbers where numbers belong, and above 0."""
    step, step_s, tokens = event.get("step"), event.get("step_s"), event.get("tokens")
    whole = type(step) is int and type(tokens) is int and tokens > 0
    return whole and isinstance(step_s, float | int) and 0 < step_s < math.inf
