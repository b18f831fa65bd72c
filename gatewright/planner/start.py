"""What a run asks as it starts on real devices: the layout that its run file leaves open, and what to measure it by.

Every rank asks for itself. The answer depends on nothing but the run file, the model's files, the GPU and the number of
ranks, so all of them get the same one; they compare before they trust it (parallel/ranks.py).
"""

from dataclasses import dataclass
from typing import Literal

from gatewright.packing.flops import Yardstick
from gatewright.planner.job import Layout
from gatewright.planner.plan_run import ask_run
from gatewright.planner.search import Question, as_judged, search, why
from gatewright.planner.time import model_flops
from gatewright.spec.errors import RunFileError, UserError
from gatewright.spec.hardware import GIB, Gpu
from gatewright.spec.plan import Candidate
from gatewright.spec.run import Hardware, Parallel, Run

DENSE: dict[str, Literal["replicate", "zero2", "zero3"]] = {"none": "replicate", "zero2": "zero2", "fsdp2": "zero3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a run starts on."""

    ranks: int
    per_node: int
    """Ranks of one node."""
    device: str
    """What torch calls a rank's device."""
    gpu: Gpu | None
    """The same in the catalogue; None where it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A run whose layout is written down, and why it is that one."""

    run: Run
    reason: str


def choose_layout(run: Run, on: Devices) -> Chosen:
    """The run with `parallel: auto` replaced by the best layout that fits; as it is where it says one, or on one rank.

    On a device that the catalogue does not know, and for a run that the planner's formulas do not cover, everything is
    replicated, and the reason says so. Raises RunFileError where no layout fits.
    """
    if run.parallel != "auto" or on.ranks == 1:
        return Chosen(run=run, reason="as the run file says")
    if on.gpu is None:
        return _written(run, Parallel(), f"auto replicates: {on.device} is not in the planner's catalogue of GPUs")
    try:
        question = question_of(run, on.gpu, on)
    except UserError as error:
        return _written(run, Parallel(), f"auto replicates, since the planner cannot take this run: {error}")
    found = search(question, gpus=on.ranks)
    for candidate in found.fitting:
        layout = found.layouts[candidate.layout]
        if supported(run, layout):
            parallel = Parallel(ep=layout.ep, dense=DENSE[layout.sharding], cp=layout.cp)
            return _written(run, parallel, _why(candidate, layout, question, of=len(found.fitting)))
    raise RunFileError(
        f"parallel: auto finds no layout of {on.ranks} × {on.gpu.name} for this run: "
        f"{_obstacle(found.too_large, found.illegal)}. Use more GPUs, see "
        "`gatewright plan`, or write a layout under parallel: to try it all the same"
    )


def yardstick(run: Run, on: Devices) -> Yardstick | None:
    """What MFU is measured by; None for a device without a known rate, and what the planner's formulas do not cover.

    The rate is that of bfloat16: a run in float32 has none.
    """
    if on.gpu is None:
        return None
    try:
        job = question_of(run, on.gpu, on).job
    except UserError:
        return None
    return Yardstick(flops=model_flops(job), peak_flops_per_s=on.gpu.bf16_flops_per_s)


def question_of(run: Run, gpu: Gpu, on: Devices) -> Question:
    """The question of the run on the devices that are there, whatever its `hardware` says."""
    there = Hardware(gpu=gpu.name, per_node=on.per_node, nodes=-(-on.ranks // on.per_node))
    return ask_run(run.model_copy(update={"hardware": there}), gpus=on.ranks)


def supported(run: Run, layout: Layout) -> bool:
    """Whether our trainer runs the layout with these settings, beyond what the planner's rules know of them."""
    whole_documents = not run.data.pack or (run.router.balance > 0 and run.router.balance_over == "sequence")
    return not (layout.cp > 1 and whole_documents)


def _written(run: Run, parallel: Parallel, reason: str) -> Chosen:
    return Chosen(run=run.model_copy(update={"parallel": parallel}), reason=reason)


def _why(candidate: Candidate, layout: Layout, question: Question, *, of: int) -> str:
    assert candidate.memory is not None and candidate.time is not None
    held, room = candidate.memory.device.bytes / GIB, question.capacity_bytes / GIB
    figures = (
        f"planned for {question.gpu.name}, the best of {of} that fit: {held:.1f} of {room:.1f} GiB, "
        f"{candidate.time.step_s:.3g} s a step"
    )
    return "; ".join([figures, *why(as_judged(question, layout), question.cluster(layout.ranks))])


def _obstacle(too_large: tuple[Candidate, ...], illegal: tuple[Candidate, ...]) -> str:
    if too_large:
        return f"the nearest needs {'; '.join(too_large[0].reasons)}"
    if illegal:
        return illegal[0].refusals[0].reason
    return "those that fit do not go with its other settings (data.pack, router.balance_over)"
