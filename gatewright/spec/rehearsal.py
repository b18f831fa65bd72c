"""Rehearsal: what a training step allocated when it ran on tensors without memory, phase by phase."""

from dataclasses import dataclass
from typing import Literal

PhaseName = Literal["load", "forward", "loss", "backward", "step"]
PHASES: tuple[PhaseName, ...] = ("load", "forward", "loss", "backward", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of tensors that a rank holds after a step; not rounded as an allocator does."""

    frozen: int
    weights: int
    """Of what trains, adapters included."""
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The fullest moment of one phase."""

    phase: PhaseName
    bytes: int
    operator: str
    """The operation whose result made the peak, with that result's type and shape."""
    block: int
    """The decoder layer at work, counted from 0; -1: none yet in this phase."""
    born: dict[PhaseName, int]
    """Bytes alive at that moment, by the phase that made them: load is weights and adapters, step is optimizer state,
    forward is kept activations. Sums to `bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Allocated bytes of one rank's second step, optimizer state included; comparable to max_memory_allocated."""

    model: str
    trainer: str
    """Whose step ran: gatewright, or transformers."""
    parameters: int
    """Everything the model holds, adapters included."""
    trainable_parameters: int
    lengths: tuple[int, ...]
    """Tokens of each document of the micro-batch."""
    layout: str = "1 rank"
    """How the model is laid out over ranks, of which this is the first."""
    assumed: tuple[str, ...] = ()
    """What was assumed of a routing that only real tensors have, in words."""
    attention: str
    layers: int
    depths: tuple[int, ...]
    """Layers of the models that ran: one that is the full depth, or two, from which the rest was extended."""
    phases: tuple[PhasePeak, ...]
    resident_bytes: int
    """Alive between two steps."""
    held: Held
    seconds: float
    """What the rehearsal itself took."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def peak(self) -> PhasePeak:
        return max(self.phases, key=lambda phase: phase.bytes)
