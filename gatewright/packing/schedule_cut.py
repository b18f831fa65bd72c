"""Cuts documents that one rank cannot hold, or not in time, over the gaps of several ranks of a micro-batch.

Each goes onto ranks of the node with least time to spare that holds it; else onto several nodes. Its pieces fill the
largest gaps, and the last one lies in the smallest that holds it. Nodes have few ranks, so plain numbers are faster
here than arrays.
"""

import math
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from gatewright.packing.arrays import FloatArray, IntArray
from gatewright.packing.schedule_score import Problem, Slot

ALIKE = 0.95
"""Of the length of a document that found no place: one that is no shorter is taken to find none either."""
Gaps = list[tuple[int, int]]
"""(tokens of a document that fit within the limit, rank), most first."""


class Price(NamedTuple):
    """What a share of a document of so many tokens costs a rank."""

    tokens: int
    fixed_s: float
    """However small it is."""
    each_s: float
    """For each of its tokens, which need not be received then."""


class Cutter:
    """Ranks of a micro-batch with seconds of work, room for tokens, and a time to keep to."""

    def __init__(self, problem: Problem, limit_s: float, load_s_R: FloatArray, room_R: IntArray) -> None:
        self.problem = problem
        self.limit_s = limit_s
        self.load_s: list[float] = load_s_R.tolist()
        self.room: list[int] = room_R.tolist()
        self.per_node = problem.costs.ranks_per_node
        spare_s_R = np.maximum(limit_s - load_s_R, 0.0)
        self.spare_s: list[float] = np.add.reduceat(spare_s_R, range(0, problem.ranks, self.per_node)).tolist()
        """[nodes] Seconds within the limit on ranks of each together."""
        self.by_spare = sorted((spare, node) for node, spare in enumerate(self.spare_s))
        self.pieces: list[tuple[int, int, int]] = []
        """Document, rank and tokens of each."""
        self.work_s = 0.0
        """Of all documents that are cut."""

    def cut(self, documents_D: IntArray) -> None:
        """Each of the documents, longest first, that finds a place within the limit."""
        costs, tokens_D = self.problem.costs, self.problem.tokens_N[documents_D]
        near, far = (self.prices(tokens_D, exchange_s) for exchange_s in (costs.near_s, costs.far_s))
        refused = math.inf
        for document, near_price, far_price in zip(documents_D.tolist(), near, far, strict=True):
            if near_price.tokens > ALIKE * refused:
                continue
            price, gaps = near_price, self.near_gaps(near_price)
            if not gaps:
                price, gaps = far_price, self.far_gaps(far_price)
            if gaps:
                self.hold(document, price, fill_gaps(gaps, price.tokens))
            else:
                refused = price.tokens

    def prices(self, tokens_D: IntArray, exchange_s: float) -> list[Price]:
        costs = self.problem.costs
        fixed_s_D = costs.split_s(tokens_D) + tokens_D * exchange_s + costs.hop_s
        each_s_D = np.maximum(costs.rate(tokens_D) - exchange_s, 1e-12)
        return list(map(Price._make, zip(tokens_D.tolist(), fixed_s_D.tolist(), each_s_D.tolist(), strict=True)))

    def near_gaps(self, price: Price) -> Gaps:
        """Of a node that holds the document; none if there is none."""
        most = min(self.problem.capacity, int((self.limit_s - price.fixed_s) / price.each_s))
        if most <= 0 or most * self.per_node < price.tokens:
            return []
        for _, node in self.by_spare[bisect_left(self.by_spare, (price.tokens * price.each_s, -1)) :]:
            gaps = self.gaps(node, price)
            if sum(gap for gap, _ in gaps) >= price.tokens:
                return gaps
        return []

    def far_gaps(self, price: Price) -> Gaps:
        """Of as many nodes as hold the document together, those with most to spare; none if all do not."""
        chosen, left = Gaps(), price.tokens
        for _, node in reversed(self.by_spare):
            gaps = self.gaps(node, price)
            chosen += gaps
            left -= sum(gap for gap, _ in gaps)
            if left <= 0:
                return sorted(chosen, reverse=True)
        return []

    def gaps(self, node: int, price: Price) -> Gaps:
        """Of the ranks of a node that have any."""
        first, end = node * self.per_node, (node + 1) * self.per_node
        left_s, each_s, gaps = self.limit_s - price.fixed_s, price.each_s, []
        for rank, (load, room) in enumerate(zip(self.load_s[first:end], self.room[first:end], strict=True), first):
            gap = int((left_s - load) / each_s)
            if gap > room:
                gap = room
            if gap > 0:
                gaps.append((gap, rank))
        gaps.sort(reverse=True)
        return gaps

    def hold(self, document: int, price: Price, shares: dict[int, int]) -> None:
        """Put a document on ranks, so many tokens on each."""
        work_s = float(self.problem.works_N[document])
        self.work_s += work_s
        if len(shares) == 1:
            price = Price(price.tokens, fixed_s=work_s, each_s=0.0)
        nodes: dict[int, float] = {}
        for rank in sorted(shares):
            seconds = price.fixed_s + shares[rank] * price.each_s
            self.load_s[rank] += seconds
            self.room[rank] -= shares[rank]
            self.pieces.append((document, rank, shares[rank]))
            node = rank // self.per_node
            nodes[node] = nodes.get(node, 0.0) + seconds
        for node, seconds in nodes.items():
            del self.by_spare[bisect_left(self.by_spare, (self.spare_s[node], node))]
            self.spare_s[node] -= seconds
            insort(self.by_spare, (self.spare_s[node], node))

    def made(self) -> Slot:
        return Slot(*np.array(self.pieces, np.int64).reshape(-1, 3).T)


def fill_gaps(gaps: Gaps, tokens: int) -> dict[int, int]:
    """Tokens of each rank: the largest gaps are filled, the last piece goes into the smallest that holds it."""
    shares: dict[int, int] = {}
    for at, (gap, rank) in enumerate(gaps):
        if gap >= tokens:
            last = next(other for held, other in reversed(gaps[at:]) if held >= tokens)
            return shares | {last: tokens}
        shares[rank] = gap
        tokens -= gap
    raise ValueError(f"{tokens} tokens more than all gaps hold")
