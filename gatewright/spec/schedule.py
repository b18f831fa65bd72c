"""ScheduleReport: what a simulation found of the steps of a data set on many ranks, for text and picture."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """One rank in one micro-batch, in seconds; what is left of the micro-batch's time it waits."""

    tokens_s: float
    """Everything that grows with tokens alone: matrices, experts and their all-to-all, windowed attention."""
    attention_s: float
    """Full attention, with what cut documents add to it."""
    exchange_s: float
    """Keys and values of cut documents, as far as computation does not hide it."""

    @property
    def busy_s(self) -> float:
        return self.tokens_s + self.attention_s + self.exchange_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTime:
    """One micro-batch."""

    duration_s: float
    """Of the slowest rank, with the fixed cost of a micro-batch."""
    ranks: tuple[RankTime, ...]
    tokens: int
    """On all ranks."""
    cut_documents: int
    """Documents that more than one rank holds."""
    widest: int
    """Ranks of the largest group; 1 where no document is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step's schedule under the cost model."""

    documents: int
    tokens: int
    strategy: str
    """The candidate that was taken."""
    step_s: float
    bound_s: float
    """Perfect balance, or the longest document on as many ranks as suit it best: no schedule is faster."""
    candidates: tuple[tuple[str, float], ...]
    """Seconds of each that was tried."""
    exchanged_bytes: int
    """Received by all ranks together, forward and backward."""
    solver_s: float
    """Processor time that finding the schedule took."""
    slots: tuple[SlotTime, ...]

    @property
    def static(self) -> tuple[str, float] | None:
        """The best candidate of one CP size for the whole step; None where none was tried."""
        found = [candidate for candidate in self.candidates if candidate[0].startswith("static")]
        return min(found, key=lambda candidate: candidate[1], default=None)

    @property
    def idle(self) -> float:
        """Share of all ranks' time that is spent waiting for the slowest: 0 to 1."""
        busy = sum(rank.busy_s for slot in self.slots for rank in slot.ranks)
        total = sum(slot.duration_s * len(slot.ranks) for slot in self.slots)
        return 1 - busy / total if total else 0.0

    @property
    def exchange(self) -> float:
        """Share of all ranks' time that is spent on keys and values of cut documents: 0 to 1."""
        total = sum(slot.duration_s * len(slot.ranks) for slot in self.slots)
        return sum(rank.exchange_s for slot in self.slots for rank in slot.ranks) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    source: str
    """The file of documents or lengths."""
    documents: int
    """In the whole file, empty ones aside."""
    tokens: int
    empty_documents: int
    longest_tokens: int
    model: str
    model_is_default: bool
    gpu: str
    rates_source: str
    """Where the machine's rates come from: measured, assumed, scaled."""
    ranks: int
    ranks_per_node: int
    capacity_tokens: int
    """Of a rank in a micro-batch."""
    capacity_is_default: bool
    steps_in_file: int
    steps: tuple[StepReport, ...]
    """Those that were simulated, evenly spread over the file."""
