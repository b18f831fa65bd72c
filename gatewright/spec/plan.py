"""Plan: what a training run will need, in bytes, seconds and dollars, and which layout was chosen and why."""

from dataclasses import dataclass, field
from typing import Literal

Metric = Literal["allocated", "reserved", "device"]
PhaseName = Literal["load", "loss", "backward", "step", "save"]
PHASE_TITLES: dict[PhaseName, str] = {
    "load": "load",
    "loss": "loss",
    "backward": "backward pass",
    "step": "optimizer step",
    "save": "save",
}
"""As they follow `at the` in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One named share of a rank's memory."""

    name: str
    bytes: int
    formula: str = ""
    """How the bytes came about, with the numbers put in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One moment of a training step at which memory can peak."""

    name: PhaseName
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate in bytes with the range that should hold nine measurements of ten."""

    metric: Metric
    """allocated: torch.cuda.max_memory_allocated. reserved: max_memory_reserved. device: what nvidia-smi or
    rocm-smi shows, with the context and the communicators."""
    bytes: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of the most loaded rank."""

    phases: tuple[Phase, ...]
    resident_bytes: int
    """Live between two steps: weights, optimizer state and whatever gradients stay."""
    allocated: Interval
    reserved: Interval
    device: Interval
    framework: str
    assumptions: tuple[str, ...] = ()
    """What was assumed where the job did not say."""

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    def by_metric(self, metric: Metric) -> Interval:
        return {"allocated": self.allocated, "reserved": self.reserved, "device": self.device}[metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """One optimizer step, in seconds; every term names the resource it waits for."""

    terms: tuple[tuple[str, float], ...]
    """(name, seconds) in the order shown; hidden communication is listed with what of it stays visible."""
    tokens_per_step: int
    gpus: int
    flops_per_step: float
    """Model FLOPs of all ranks, recomputation not counted."""
    efficiency: float
    """Share of the GPU's peak matrix rate the compute term assumes."""
    efficiency_source: str

    @property
    def step_s(self) -> float:
        return sum(seconds for _, seconds in self.terms)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    gpus: int
    hours: float
    usd_per_gpu_hour: float | None
    """None: no price with a source is known, and none was given."""
    price_date: str
    price_source: str

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.hours

    @property
    def usd(self) -> float | None:
        return None if self.usd_per_gpu_hour is None else self.gpu_hours * self.usd_per_gpu_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rule of planner/legal.py that a layout breaks."""

    rule: str
    """Its id, such as ep-divides-experts."""
    reason: str
    """Why, with the numbers, and what would be legal."""
    backend: str
    """Backend and version the rule holds for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout, judged."""

    layout: str
    """Short text: `8 GPUs: ep8, dp8 zero2`."""
    memory: MemoryEstimate | None
    time: TimeEstimate | None
    cost: CostEstimate | None
    fits: bool
    refusals: tuple[Refusal, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why each dimension has its size, or which byte does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting that takes memory off the fullest rank, and what is left then."""

    name: str
    """What it does, as the doctor's table of settings calls it: recompute_activations."""
    setting: str
    """Key of the run file."""
    was: str
    value: str
    saved_bytes: int
    """Of the device's memory."""
    allocated_bytes: int
    """Predicted at the peak, with the new value."""
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one planning question."""

    model: str
    parameters: int
    trainable_parameters: int
    method: str
    gpu: str
    gpus: int
    gpu_memory_bytes: int
    capacity_bytes: int
    """What a run may use of it: the device's total less a safety margin."""
    chosen: Candidate | None
    """The best layout that is legal and fits; None where none does."""
    alternatives: tuple[Candidate, ...] = ()
    rejected: tuple[Candidate, ...] = ()
    """The nearest misses: illegal, or too large."""
    fewest_gpus: int | None = None
    """Fewest GPUs of this kind that fit, over the sizes looked at."""
    knobs: tuple[Knob, ...] = ()
    """Settings that would take memory off the chosen layout, or off the nearest that is too large; most first."""
    notes: tuple[str, ...] = field(default=())
    """What the reader should know: the case computed, assumptions, checks that could not be made."""

    @property
    def memory(self) -> MemoryEstimate | None:
        """Of the chosen layout, or of the nearest that is too large."""
        every = (self.chosen, *self.rejected)
        return next((item.memory for item in every if item is not None and item.memory is not None), None)

    @property
    def fits(self) -> bool:
        return self.chosen is not None
