"""What candidate schedules are made of, what they cost, and the bounds that none can beat."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gatewright.packing.cost import CostModel
from gatewright.packing.pack import IntArray


class Placement(NamedTuple):
    """A document in a micro-batch: the ranks that hold it, ascending, and the tokens of each (at least 1)."""

    document: int
    ranks: tuple[int, ...]
    shares: tuple[int, ...]


Slot = list[Placement]
"""One micro-batch on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A step to be scheduled. `problem_of` makes one."""

    ranks: int
    capacity: int
    """Tokens a rank can hold in a micro-batch."""
    costs: CostModel
    tokens: list[int]
    """[documents] as Python integers: loops over documents are several times faster on them than on an array."""
    work_s: list[float]
    """[documents] seconds of each on one rank."""
    longest_first: list[int]
    """Documents to be placed by descending length, ties by number."""

    @property
    def fewest_slots(self) -> int:
        """Micro-batches that the tokens need at least."""
        return -(-sum(self.tokens[document] for document in self.longest_first) // (self.ranks * self.capacity))

    def only(self, documents: list[int]) -> "Problem":
        """The same with these documents only, longest first; they keep their numbers."""
        return replace(self, longest_first=documents)


def problem_of(lengths_N: IntArray, *, ranks: int, capacity: int, costs: CostModel) -> Problem:
    return Problem(
        ranks=ranks,
        capacity=capacity,
        costs=costs,
        tokens=lengths_N.tolist(),
        work_s=costs.works(lengths_N).tolist(),
        longest_first=np.argsort(-lengths_N, kind="stable").tolist(),
    )


def loads_s(problem: Problem, slot: Slot) -> list[float]:
    """[ranks] seconds of each in one micro-batch, without its fixed cost."""
    costs = problem.costs
    load, widest = [0.0] * problem.ranks, [1] * problem.ranks
    for document, ranks, shares in slot:
        if len(ranks) == 1:
            load[ranks[0]] += problem.work_s[document]
            continue
        tokens = problem.tokens[document]
        exchange = costs.exchange_s(ranks[0], ranks[-1])
        for rank, share in zip(ranks, shares, strict=True):
            load[rank] += costs.share_s(tokens, share, exchange)
            widest[rank] = max(widest[rank], len(ranks))
    return [seconds + costs.hop_s * (wide - 1) for seconds, wide in zip(load, widest, strict=True)]


def step_s(problem: Problem, slots: Sequence[Slot]) -> float:
    """Seconds of the step in lockstep: each micro-batch takes as long as its slowest rank."""
    return sum(max(loads_s(problem, slot)) + problem.costs.slot_s for slot in slots)


def bound_s(problem: Problem, *, exchange: bool = False) -> float:
    """No schedule is faster: all work spread evenly, or the longest document on as many ranks as suit it best;
    and the fixed cost of as many micro-batches as the tokens need.

    exchange: also count what documents that no rank can hold alone must exchange at least, which is as inevitable.
    """
    if not problem.longest_first:
        return 0.0
    even = sum(problem.work_s[document] for document in problem.longest_first) / problem.ranks
    if exchange:
        even += forced_exchange_s(problem) / problem.ranks
    longest = problem.tokens[problem.longest_first[0]]
    best = min(alone_s(problem, longest, ranks) for ranks in range(-(-longest // problem.capacity), problem.ranks + 1))
    return max(even, best) + problem.fewest_slots * problem.costs.slot_s


def forced_exchange_s(problem: Problem) -> float:
    """What cutting adds to all documents longer than a rank can hold, each on as few ranks as can hold it."""
    costs, total = problem.costs, 0.0
    for document in problem.longest_first:
        tokens = problem.tokens[document]
        ranks = -(-tokens // problem.capacity)
        if ranks == 1:
            break
        tiles = ranks * costs.split_s(tokens) - costs.attention_s * tokens * costs.tile_tokens
        total += tiles + (ranks - 1) * tokens * (costs.near_s if ranks <= costs.ranks_per_node else costs.far_s)
    return total


def alone_s(problem: Problem, tokens: int, ranks: int) -> float:
    """Of a document spread evenly over neighbouring ranks that hold nothing else."""
    costs = problem.costs
    if ranks == 1:
        return costs.whole_s(tokens)
    return costs.share_s(tokens, -(-tokens // ranks), costs.exchange_s(0, ranks - 1)) + costs.hop_s * (ranks - 1)


def even_shares(tokens: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank of a group; the first ones take one more where it does not come out even."""
    each, more = divmod(tokens, ranks)
    return (each + 1,) * more + (each,) * (ranks - more)


def place_evenly(problem: Problem, document: int, *, first: int, ranks: int) -> Placement:
    """A document on neighbouring ranks; on fewer when it has fewer tokens than they are."""
    ranks = min(ranks, problem.tokens[document])
    return Placement(document, tuple(range(first, first + ranks)), even_shares(problem.tokens[document], ranks))
