"""The schedule of a step: which tokens of which document each rank holds in each micro-batch; integers only.

documents → candidates → the one that a single cost model finds fastest → slices (document, start, end) of every rank

Every rank has the same number of micro-batches, as sharded weights and experts need it; one with nothing to do in one
of them runs a dummy of weight zero. A document is cut in mirrored pairs of chunks, so that each share of its tokens is
the same share of its attention:

    3 ranks, equal shares     |0 |1 |2 |2 |1 |0 |      uneven ones     |0     |1|2 |2 |1|0     |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gatewright.packing.arrays import IntArray
from gatewright.packing.cost import CostModel
from gatewright.packing.schedule_fill import by_seconds, by_square, sequential
from gatewright.packing.schedule_mixed import mixed
from gatewright.packing.schedule_score import Problem, Slot, bound_s, longest_first, problem_of, step_s
from gatewright.packing.schedule_static import group_sizes, per_micro_batch, static

SEARCHED = 400_000
"""Documents × micro-batches up to which all candidates are tried: the effort of some grows with that product."""
SHARES = 4_000_000
"""Shares that a static candidate may cut a larger step into."""
OPERATION_S = 1.2e-6
"""Seconds of one of the operations that the effort of candidates is estimated in, on one core."""
SLACKS = (0.03, 0.0, 0.08)
"""Times beyond an even spread that the thorough search tries."""
FILL = 0.9
"""Share of the room of a micro-batch that is given to documents when each has its own CP size."""


class Slice(NamedTuple):
    """Tokens [start, end) of a document."""

    document: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What all ranks do at one time."""

    slices: tuple[tuple[Slice, ...], ...]
    """[ranks] of each, whole documents and parts; empty for a rank that runs a dummy."""
    groups: dict[int, tuple[int, ...]]
    """Document → its ranks, ascending, for each document that more than one rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    ranks: int
    capacity: int
    micro_batches: tuple[MicroBatch, ...]
    strategy: str
    """Name of the candidate that was taken."""
    step_s: float
    """Seconds under the cost model, which takes the slowest rank of each micro-batch."""
    bound_s: float
    """No schedule of these documents is faster under it."""
    candidates: tuple[tuple[str, float], ...]
    """Each that was tried and its seconds, in the order of trying."""


def schedule(
    lengths: npt.ArrayLike,
    *,
    ranks: int,
    capacity: int,
    costs: CostModel,
    aligned: bool = False,
    size: int | None = None,
    share: float | None = None,
) -> Schedule:
    """The fastest of several schedules of documents of these lengths, on `ranks` ranks of `capacity` tokens each.

    aligned: only groups [k · size, (k + 1) · size) of one size a micro-batch, which exist beforehand.
    size: only static context parallelism with so many ranks a document; it must divide `ranks`.
    share: of the step's seconds that the search may take, such as 0.01; candidates that would exceed it are left out,
    but for the first, greedy one. Their effort is estimated, not timed, so that all ranks leave out the same.

    Raises ValueError for lengths that are no whole numbers or below 1, and for a document longer than all ranks hold.
    """
    lengths_N = checked(lengths, ranks=ranks, capacity=capacity)
    problem = problem_of(lengths_N, ranks=ranks, capacity=capacity, costs=costs)
    tried: list[tuple[str, float, list[Slot]]] = []
    offered = candidates(problem, aligned=aligned)
    if size is not None and len(lengths_N):
        offered = iter([static_candidate(problem, size)])
    left_s = math.inf
    for name, operations, make in offered:
        if tried and operations * OPERATION_S > left_s:
            continue
        slots = make()
        seconds = step_s(problem, slots)
        left_s = (left_s if tried or share is None else share * seconds) - operations * OPERATION_S
        tried.append((name, seconds, slots))
    name, seconds, slots = min(tried, key=lambda candidate: candidate[1])
    order_N = longest_first(lengths_N)
    return Schedule(
        ranks=ranks,
        capacity=capacity,
        micro_batches=tuple(micro_batch(slot._replace(documents_P=order_N[slot.documents_P]), ranks) for slot in slots),
        strategy=name,
        step_s=seconds,
        bound_s=min(bound_s(problem), seconds),  # they may differ by rounding
        candidates=tuple((name, seconds) for name, seconds, _ in tried),
    )


Candidate = tuple[str, int, Callable[[], list[Slot]]]
"""Name, estimated operations, and what makes it. The estimates are fits to times on 6 to 512 ranks."""


def static_candidate(problem: Problem, size: int) -> Candidate:
    operations = 700 + len(problem.tokens_N) * (size + 1) // 25
    return f"static CP {size}", operations, partial(static, problem, size=size)


def candidates(problem: Problem, *, aligned: bool) -> Iterator[Candidate]:
    """The greedy one first."""
    documents, slots = len(problem.tokens_N), problem.fewest_slots
    if not documents:
        yield "nothing", 0, list
        return
    searched = documents * slots <= SEARCHED
    if not aligned:
        parts = 1 if searched else math.isqrt(documents * slots // SEARCHED) + 1
        operations = 2500 + 20 * slots * problem.ranks + 2 * documents
        yield "mixed CP", operations, partial(mixed, problem, parts=parts)
    if searched and not aligned:
        operations = 2500 + slots * (450 + 35 * problem.ranks) + 3 * documents
        yield "mixed CP, thorough", operations, partial(mixed, problem, slacks=SLACKS, cut_late=True)
    sizes = group_sizes(problem, problem.longest)
    fewer = [size for size in sizes if searched or documents * size <= SHARES]
    for size in fewer or sizes[: int(aligned)]:
        yield static_candidate(problem, size)
    if not searched:
        return
    yield "CP of each micro-batch", 1700 + documents, partial(per_micro_batch, problem, fill=FILL)
    if not aligned:
        operations = 100 + slots * (8 * problem.ranks + 2 * documents)
        yield "sequential fill", operations, partial(sequential, problem, by_seconds(problem))
        yield "sequential fill by square", operations, partial(sequential, problem, by_square)


def checked(lengths: npt.ArrayLike, *, ranks: int, capacity: int) -> npt.NDArray[np.int64]:
    array = np.asarray(lengths)
    if ranks < 1 or capacity < 1:
        raise ValueError(f"{ranks} ranks of {capacity} tokens; wanted at least 1 of each")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"lengths are {array.dtype}; they must be whole numbers of tokens")
    lengths_N = array.astype(np.int64).reshape(-1)
    if not len(lengths_N):
        return lengths_N
    if (shortest := int(lengths_N.min())) < 1:
        raise ValueError(f"document {int(lengths_N.argmin())} has {shortest} tokens; every document needs at least 1")
    if (longest := int(lengths_N.max())) > ranks * capacity:
        raise ValueError(
            f"document {int(lengths_N.argmax())} has {longest:,} tokens, more than all {ranks} ranks can hold together "
            f"({ranks} × {capacity:,} = {ranks * capacity:,}): shorten it, or give more ranks or tokens a rank"
        )
    return lengths_N


def micro_batch(slot: Slot, ranks: int) -> MicroBatch:
    """The slices of each rank, by ascending document."""
    slot = Slot(*(column_P[np.argsort(slot.documents_P, kind="stable")] for column_P in slot))
    first_D, widths_D = slot.documents()
    ended_P = np.cumsum(slot.shares_P)
    before_P = np.repeat(ended_P[first_D] - slot.shares_P[first_D], widths_D)
    tokens_P = np.repeat(np.add.reduceat(slot.shares_P, first_D), widths_D)
    chunks_C2 = mirrored(ended_P - slot.shares_P - before_P, ended_P - before_P, tokens_P).reshape(-1, 2)
    some_C = chunks_C2[:, 0] < chunks_C2[:, 1]
    columns = np.repeat(slot.documents_P, 2), chunks_C2[:, 0], chunks_C2[:, 1]
    rows = zip(*(column_C[some_C].tolist() for column_C in columns), strict=True)
    slices = map(partial(tuple.__new__, Slice), rows)  # Slice._make takes twice as long
    held: list[list[Slice]] = [[] for _ in range(ranks)]
    for rank, piece in zip(np.repeat(slot.ranks_P, 2)[some_C].tolist(), slices, strict=True):
        held[rank].append(piece)
    groups = {
        int(slot.documents_P[first]): tuple(slot.ranks_P[first : first + width].tolist())
        for first, width in zip(first_D.tolist(), widths_D.tolist(), strict=True)
        if width > 1
    }
    return MicroBatch(slices=tuple(map(tuple, held)), groups=groups)


def mirrored(begun_P: IntArray, ended_P: IntArray, tokens_P: IntArray) -> IntArray:
    """[pieces, 2, (start, end)] chunks of the piece that begins and ends after so many of its document's tokens.

    One from the front, and its mirror image from the back, which is empty where the two touch and are joined.
    """
    front = begun_P // 2, ended_P // 2
    back = tokens_P - (ended_P + 1) // 2, tokens_P - (begun_P + 1) // 2
    touch_P = front[1] >= back[0]
    ends_P22 = [front[0], np.where(touch_P, back[1], front[1])], [np.where(touch_P, back[1], back[0]), back[1]]
    return np.moveaxis(np.array(ends_P22), -1, 0)
