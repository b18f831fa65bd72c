"""The rehearsal itself: builds a model on fake tensors, runs steps, and makes one account of one depth or two."""

import gc
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from gatewright.probe.fake import fake_tensors, make_fake
from gatewright.probe.fake_memory import LiveBytes
from gatewright.probe.rehearsal_depth import Peaks, choose_depths, cut, decoder_blocks, extend, line, signatures
from gatewright.spec.errors import GatewrightError, ModelError
from gatewright.spec.rehearsal import PHASES, PhaseName, PhasePeak, Rehearsal

Build = Callable[[], PreTrainedModel]
"""A model ready to train, adapters included; called with the meta device in force."""
Steps = Callable[[PreTrainedModel, LiveBytes], None]
"""Trains the model for a few steps; LiveBytes.begin_step marks each beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One depth's account."""

    peaks: Peaks
    resident_bytes: int
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
    multiple: int = 1,
    full_depth: bool = False,
) -> Rehearsal:
    """Raises ModelError when the model cannot be built, or its step needs a value that fake tensors do not have.

    `multiple`: layers after which something outside the blocks repeats (see choose_depths).
    """
    began = time.perf_counter()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what we raise
    try:
        with torch.device("meta"):
            blocks = signatures(build())
        depths = (len(blocks),) if full_depth else choose_depths(blocks, multiple=multiple)
        runs = [observe_depth(build, steps, depth) for depth in depths]
    except GatewrightError:
        raise
    except Exception as error:  # whatever an architecture of transformers may raise
        raise ModelError(
            f"{model}: cannot be rehearsed: {type(error).__name__}: {first_line(error)}; plan it without rehearsal, "
            "and expect the trainer to meet the same on packed documents"
        ) from error
    whole = runs[0] if len(runs) == 1 else _extended(runs[0], runs[1], depths=(depths[0], depths[1]), blocks=blocks)
    return Rehearsal(
        model=model,
        trainer=trainer,
        parameters=whole.parameters,
        trainable_parameters=whole.trainable_parameters,
        lengths=lengths,
        attention=attention,
        layers=len(blocks),
        depths=depths,
        phases=tuple(_highest(whole.peaks, phase) for phase in PHASES),
        resident_bytes=whole.resident_bytes,
        seconds=time.perf_counter() - began,
    )


def observe_depth(build: Build, steps: Steps, depth: int) -> Observed:
    """The steps of the model's first `depth` layers, on fake tensors."""
    with torch.device("meta"):
        model = build()
        cut(model, depth)
    with fake_tensors() as mode:
        make_fake(model, mode)
        return observe_model(model, steps)


def observe_model(model: PreTrainedModel, steps: Steps) -> Observed:
    """The steps of a model as it stands, on fake or on real tensors."""
    gc.collect()  # what an earlier model left behind must not be freed while this one is counted
    with LiveBytes() as live:
        live.watch(model, decoder_blocks(model))
        steps(model, live)
    return Observed(
        peaks=live.peaks,
        resident_bytes=live.resident_bytes,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def _extended(shallow: Observed, deep: Observed, *, depths: tuple[int, int], blocks: list[Hashable]) -> Observed:
    times = (len(blocks) - depths[0]) / (depths[1] - depths[0])
    return Observed(
        peaks=extend(shallow.peaks, deep.peaks, depths=depths, blocks=blocks),
        resident_bytes=line(shallow.resident_bytes, deep.resident_bytes, times=times),
        parameters=line(shallow.parameters, deep.parameters, times=times),
        trainable_parameters=line(shallow.trainable_parameters, deep.trainable_parameters, times=times),
    )


def _highest(peaks: Peaks, phase: PhaseName) -> PhasePeak:
    (_, block), peak = max(((s, p) for s, p in peaks.items() if s[0] == phase), key=lambda item: item[1].bytes)
    return PhasePeak(phase=phase, bytes=peak.bytes, operator=peak.operator, block=block, born=dict(peak.by_birth))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
