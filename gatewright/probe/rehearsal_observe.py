"""The rehearsal itself: builds a model on fake tensors, runs steps, and makes one account of one depth or two."""

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.probe.fake import fake_tensors, make_fake
from gatewright.probe.fake_memory import LiveBytes, held_tensors
from gatewright.probe.rehearsal_depth import Peaks, choose_depths, cut, decoder_blocks, extend, line, signatures
from gatewright.spec.errors import GatewrightError, ModelError
from gatewright.spec.rehearsal import PHASES, Held, PhaseName, PhasePeak, Rehearsal

Build = Callable[[], PreTrainedModel]
"""A model ready to train, adapters included; called with the meta device in force."""
Steps = Callable[[PreTrainedModel, LiveBytes], Held]
"""Trains the model for a few steps and tells what is held after them; LiveBytes.begin_step marks each beginning."""
Shapes = Callable[[PreTrainedModel], Mapping[str, tuple[int, ...]]]
"""Names of parameters of which this rank holds a part that does not know it -> the shape of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One depth's account."""

    peaks: Peaks
    resident_bytes: int
    held: Held
    parameters: int
    trainable_parameters: int


def observe(
    build: Build,
    steps: Steps,
    *,
    model: str,
    trainer: str,
    lengths: tuple[int, ...],
    attention: str,
    layout: str = "1 rank",
    assumed: tuple[str, ...] = (),
    shapes: Shapes = lambda model: {},
    multiple: int = 1,
    reach: int = 0,
    full_depth: bool = False,
) -> Rehearsal:
    """Raises ModelError when the model cannot be built, or its step needs a value that fake tensors do not have.

    `multiple`: layers after which something outside the blocks repeats (see choose_depths, also for `reach`).
    """
    began = time.perf_counter()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what we raise
    try:
        with torch.device("meta"):
            blocks = signatures(build())
        depths = (len(blocks),) if full_depth else choose_depths(blocks, multiple=multiple, reach=reach)
        runs = [observe_depth(build, steps, depth, shapes=shapes) for depth in depths]
    except GatewrightError:
        raise
    except Exception as error:  # whatever an architecture of transformers may raise
        raise ModelError(
            f"{model}: cannot be rehearsed: {type(error).__name__}: {first_line(error)}; plan it without rehearsal, "
            "and expect the trainer to meet the same on packed documents"
        ) from error
    whole = runs[0]
    if len(runs) == 2:
        whole = _extended(runs[0], runs[1], depths=(depths[0], depths[1]), blocks=blocks, reach=reach)
    return Rehearsal(
        model=model,
        trainer=trainer,
        parameters=whole.parameters,
        trainable_parameters=whole.trainable_parameters,
        lengths=lengths,
        layout=layout,
        assumed=assumed,
        attention=attention,
        layers=len(blocks),
        depths=depths,
        phases=tuple(_highest(whole.peaks, phase) for phase in PHASES),
        resident_bytes=whole.resident_bytes,
        held=whole.held,
        seconds=time.perf_counter() - began,
    )


def observe_depth(build: Build, steps: Steps, depth: int, *, shapes: Shapes = lambda model: {}) -> Observed:
    """The steps of the model's first `depth` layers, on fake tensors."""
    with torch.device("meta"):
        model = build()
        cut(model, depth)
    with fake_tensors() as mode:
        make_fake(model, mode)
        return observe_model(model, steps, shapes=shapes)


def observe_model(model: PreTrainedModel, steps: Steps, *, shapes: Shapes = lambda model: {}) -> Observed:
    """The steps of a model as it stands, on fake or on real tensors."""
    gc.collect()  # what an earlier model left behind must not be freed while this one is counted
    gc.disable()  # nor may cycles be freed at a moment that differs from run to run
    try:
        with LiveBytes() as live:
            live.watch(model, decoder_blocks(model))
            held = steps(model, live)
    finally:
        gc.enable()
    whole_shapes = shapes(model)
    sizes = [(prod(whole_shapes.get(name, p.shape)), p.requires_grad) for name, p in model.named_parameters()]
    return Observed(
        peaks=live.peaks,
        resident_bytes=live.resident_bytes,
        held=held,
        parameters=sum(size for size, _ in sizes),
        trainable_parameters=sum(size for size, trains in sizes if trains),
    )


def held_after(
    model: PreTrainedModel, *, trained: Iterable[Tensor], owned: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> Held:
    """`trained`: weights as the model holds them; `owned`: the tensors of them that the optimizer updates."""
    known, owned = set(map(id, trained)), list(owned)
    sizes = [(id(p) in known, sum(part.nbytes for part in held_tensors(p))) for p in model.parameters()]
    states = [state for p in owned for state in optimizer.state[p].values() if isinstance(state, Tensor)]
    return Held(
        frozen=sum(size for trains, size in sizes if not trains),
        weights=sum(size for trains, size in sizes if trains),
        gradients=sum(p.grad.nbytes for p in owned if p.grad is not None),
        optimizer=sum(state.nbytes for state in states if state.dim()),
    )


def _extended(
    shallow: Observed, deep: Observed, *, depths: tuple[int, int], blocks: list[Hashable], reach: int
) -> Observed:
    times = (len(blocks) - depths[0]) / (depths[1] - depths[0])
    return Observed(
        peaks=extend(shallow.peaks, deep.peaks, depths=depths, blocks=blocks, reach=reach),
        resident_bytes=line(shallow.resident_bytes, deep.resident_bytes, times=times),
        held=Held(
            **{key: line(value, asdict(deep.held)[key], times=times) for key, value in asdict(shallow.held).items()}
        ),
        parameters=line(shallow.parameters, deep.parameters, times=times),
        trainable_parameters=line(shallow.trainable_parameters, deep.trainable_parameters, times=times),
    )


def _highest(peaks: Peaks, phase: PhaseName) -> PhasePeak:
    (_, block), peak = max(((s, p) for s, p in peaks.items() if s[0] == phase), key=lambda item: item[1].bytes)
    return PhasePeak(phase=phase, bytes=peak.bytes, operator=peak.operator, block=block, born=dict(peak.by_birth))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
