"""What candidate schedules are made of, what they cost, and the bounds that none can beat.

Documents are numbered longest first here, so documents in ascending order are in descending order of length and work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gatewright.packing.arrays import FloatArray, IntArray
from gatewright.packing.cost import CostModel


class Slot(NamedTuple):
    """One micro-batch on all ranks, as a table of pieces.

    Pieces of a document stand together, by ascending rank; a document that lies whole has one.
    """

    documents_P: IntArray
    ranks_P: IntArray
    shares_P: IntArray
    """Tokens of each piece, at least 1."""

    def documents(self) -> tuple[IntArray, IntArray]:
        """The first piece of each document, and how many it has."""
        first_D = np.flatnonzero(np.diff(self.documents_P, prepend=-1))
        return first_D, np.diff(first_D, append=len(self.documents_P))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A step to be scheduled. `problem_of` makes one."""

    ranks: int
    capacity: int
    """Tokens a rank can hold in a micro-batch."""
    costs: CostModel
    tokens_N: IntArray
    """[documents] Tokens of each, descending."""

    @cached_property
    def works_N(self) -> FloatArray:
        """[documents] Seconds of each on one rank."""
        return self.costs.whole_s(self.tokens_N)

    @cached_property
    def fewest_slots(self) -> int:
        """Micro-batches that the tokens need at least."""
        return -(-int(self.tokens_N.sum()) // (self.ranks * self.capacity))

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.tokens_N[0])


def problem_of(lengths_N: IntArray, *, ranks: int, capacity: int, costs: CostModel) -> Problem:
    """Of documents in any order. `longest_first` says which document each of the problem's numbers is."""
    tokens_N = lengths_N[longest_first(lengths_N)]
    return Problem(ranks=ranks, capacity=capacity, costs=costs, tokens_N=tokens_N)


def longest_first(lengths_N: IntArray) -> IntArray:
    """Documents by descending length, ties by number."""
    return np.argsort(-lengths_N, kind="stable")


def loads_s(problem: Problem, slot: Slot) -> FloatArray:
    """[ranks] seconds of each in one micro-batch, without its fixed cost."""
    costs = problem.costs
    first_D, widths_D = slot.documents()
    cut_P = np.repeat(widths_D > 1, widths_D)
    exchange_D = costs.exchange_s(slot.ranks_P[first_D], slot.ranks_P[first_D + widths_D - 1])
    tokens_P = problem.tokens_N[slot.documents_P]
    shares_s_P = costs.share_s(tokens_P, slot.shares_P, np.repeat(exchange_D, widths_D))
    seconds_P = np.where(cut_P, shares_s_P, problem.works_N[slot.documents_P])
    widest_R = np.ones(problem.ranks, np.int64)
    np.maximum.at(widest_R, slot.ranks_P[cut_P], np.repeat(widths_D, widths_D)[cut_P])
    return np.bincount(slot.ranks_P, seconds_P, minlength=problem.ranks) + costs.hop_s * (widest_R - 1)


def step_s(problem: Problem, slots: Sequence[Slot]) -> float:
    """Seconds of the step in lockstep: each micro-batch takes as long as its slowest rank."""
    return sum(float(loads_s(problem, slot).max()) + problem.costs.slot_s for slot in slots)


def bound_s(problem: Problem, *, exchange: bool = False) -> float:
    """No schedule is faster: all work spread evenly, or the longest document on as many ranks as suit it best;
    and the fixed cost of as many micro-batches as the tokens need.

    exchange: also count what documents that no rank can hold alone must exchange at least, which is as inevitable.
    """
    if not len(problem.tokens_N):
        return 0.0
    even = float(problem.works_N.sum()) / problem.ranks
    if exchange:
        even += forced_exchange_s(problem) / problem.ranks
    return max(even, fastest_s(problem, problem.longest)) + problem.fewest_slots * problem.costs.slot_s


def forced_exchange_s(problem: Problem) -> float:
    """What cutting adds to all documents longer than a rank can hold, each on as few ranks as can hold it."""
    costs = problem.costs
    tokens_L = problem.tokens_N[problem.tokens_N > problem.capacity]
    ranks_L = -(-tokens_L // problem.capacity)
    exchange_L = np.where(ranks_L <= costs.ranks_per_node, costs.near_s, costs.far_s)
    tiles_L = ranks_L * costs.split_s(tokens_L) - costs.attention_s * tokens_L * costs.tile_tokens
    return float((tiles_L + (ranks_L - 1) * tokens_L * exchange_L).sum())


def alone_s(costs: CostModel, tokens_D: npt.ArrayLike, ranks_D: npt.ArrayLike) -> FloatArray:
    """Of documents spread evenly over so many neighbouring ranks that hold nothing else."""
    tokens, ranks = np.asarray(tokens_D), np.asarray(ranks_D)
    ranks = np.minimum(ranks, tokens)
    exchange = np.where(ranks <= costs.ranks_per_node, costs.near_s, costs.far_s)
    spread = costs.share_s(tokens, -(-tokens // ranks), exchange) + costs.hop_s * (ranks - 1)
    return np.where(ranks == 1, costs.whole_s(tokens), spread)


def place_evenly(problem: Problem, documents_D: IntArray, *, first_D: npt.ArrayLike, ranks_D: npt.ArrayLike) -> Slot:
    """Documents on neighbouring ranks from a first one on; on fewer than `ranks_D` that have fewer tokens.

    The first ranks of a document take one token more where it does not come out even.
    """
    tokens_D = problem.tokens_N[documents_D]
    widths_D = np.minimum(ranks_D, tokens_D)
    place_P = np.arange(int(widths_D.sum())) - np.repeat(np.cumsum(widths_D) - widths_D, widths_D)
    each_D, more_D = tokens_D // widths_D, tokens_D % widths_D
    return Slot(
        documents_P=np.repeat(documents_D, widths_D),
        ranks_P=np.repeat(np.broadcast_to(first_D, widths_D.shape), widths_D) + place_P,
        shares_P=np.repeat(each_D, widths_D) + (place_P < np.repeat(more_D, widths_D)),
    )


def fastest_s(problem: Problem, tokens: int) -> float:
    """Of a document spread evenly over as many ranks as suit it best, alone."""
    widths_W = np.arange(-(-tokens // problem.capacity), problem.ranks + 1)
    return float(alone_s(problem.costs, tokens, widths_W).min())


def joined(parts: Sequence[Slot]) -> Slot:
    """The micro-batch of all their pieces; no document may be in two of them."""
    return Slot(*(np.concatenate(column) for column in zip(*parts, strict=True)))
