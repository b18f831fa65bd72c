"""Cuts documents that one rank cannot hold, or not in time, over the gaps of several ranks of a micro-batch.

Each goes onto as few ranks of one node as hold it, of the node with least time to spare; else onto several nodes. Its
pieces fill the largest gaps, and the last one lies in the smallest that holds it. Nodes are few and have few ranks, so
plain numbers are faster here than arrays.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

from gatewright.packing.pack import IntArray
from gatewright.packing.schedule_score import FloatArray, Problem, Slot, alone_s, place_evenly

Gaps = list[tuple[int, int]]
"""(tokens of a document that fit within the limit, rank), most first."""


class Cutter:
    """Ranks of a micro-batch with seconds of work, room for tokens, and a time to keep to."""

    def __init__(self, problem: Problem, limit_s: float, load_s_R: FloatArray, room_R: IntArray) -> None:
        self.problem = problem
        self.limit_s = limit_s
        self.load_s: list[float] = load_s_R.tolist()
        self.room: list[int] = room_R.tolist()
        per_node = problem.costs.ranks_per_node
        self.nodes = [range(at, min(at + per_node, problem.ranks)) for at in range(0, problem.ranks, per_node)]
        self.spare_s = [self.left_s(node) for node in self.nodes]
        self.by_spare = sorted((spare, number) for number, spare in enumerate(self.spare_s))
        """(seconds to spare, node), fewest first."""
        self.held: list[tuple[int, dict[int, int]]] = []
        """Documents, and the tokens of each on each of its ranks."""

    def left_s(self, node: range) -> float:
        """Seconds within the limit on ranks of a node together."""
        return sum(max(0.0, self.limit_s - load) for load in self.load_s[node.start : node.stop])

    def cut(self, document: int) -> bool:
        """Whether the document found a place within the limit."""
        tokens, costs = int(self.problem.tokens_N[document]), self.problem.costs
        most = self.most(tokens, costs.near_s)
        if not most:
            return False
        fewest = -(-tokens // most)
        best: tuple[int, Gaps] | None = None
        at = bisect_left(self.by_spare, (tokens * (costs.rate(tokens) - costs.near_s), -1))
        for _, number in self.by_spare[at:] if fewest <= costs.ranks_per_node else []:
            gaps = self.gaps(tokens, self.nodes[number], costs.near_s)
            if (count := ranks_needed(gaps, tokens)) and (best is None or count < best[0]):
                best = count, gaps
                if count == fewest:
                    break
        gaps = best[1] if best else self.far_gaps(tokens)
        if sum(gap for gap, _ in gaps) < tokens:
            return False
        self.hold(document, fill_gaps(gaps, tokens))
        return True

    def fixed_s(self, tokens: int, exchange_s: float) -> float:
        """What a rank pays for any share of a document, however small."""
        costs = self.problem.costs
        return costs.split_s(tokens) + tokens * exchange_s + costs.hop_s

    def most(self, tokens: int, exchange_s: float) -> int:
        """Tokens of a document that fit on an empty rank."""
        within = (self.limit_s - self.fixed_s(tokens, exchange_s)) / self.each_s(tokens, exchange_s)
        return min(self.problem.capacity, max(0, int(within)))

    def each_s(self, tokens: int, exchange_s: float) -> float:
        """Seconds of a token more in a share, which need not be received then."""
        return max(self.problem.costs.rate(tokens) - exchange_s, 1e-12)

    def gaps(self, tokens: int, node: range, exchange_s: float) -> Gaps:
        """Of the ranks of a node that have any."""
        left_s, each_s = self.limit_s - self.fixed_s(tokens, exchange_s), self.each_s(tokens, exchange_s)
        room, gaps = self.room, []
        for rank in node:
            gap = int((left_s - self.load_s[rank]) / each_s)
            if gap > room[rank]:
                gap = room[rank]
            if gap > 0:
                gaps.append((gap, rank))
        gaps.sort(reverse=True)
        return gaps

    def far_gaps(self, tokens: int) -> Gaps:
        """Of as many nodes as hold the document together, those with most to spare."""
        chosen: Gaps = []
        left, far_s = tokens, self.problem.costs.far_s
        for _, number in reversed(self.by_spare):
            gaps = self.gaps(tokens, self.nodes[number], far_s)
            chosen += gaps
            left -= sum(gap for gap, _ in gaps)
            if left <= 0:
                break
        return sorted(chosen, reverse=True)

    def hold(self, document: int, shares: dict[int, int]) -> None:
        """Put a document on ranks, so many tokens on each."""
        costs, tokens = self.problem.costs, int(self.problem.tokens_N[document])
        self.held.append((document, shares))
        exchange_s = costs.exchange_s(min(shares), max(shares))
        fixed_s, each_s = self.fixed_s(tokens, exchange_s), costs.rate(tokens) - exchange_s
        if len(shares) == 1:
            fixed_s, each_s = float(self.problem.works_N[document]), 0.0
        for rank, share in shares.items():
            self.room[rank] -= share
            self.load_s[rank] += fixed_s + share * each_s
        for number in {rank // costs.ranks_per_node for rank in shares}:
            del self.by_spare[bisect_left(self.by_spare, (self.spare_s[number], number))]
            self.spare_s[number] = self.left_s(self.nodes[number])
            insort(self.by_spare, (self.spare_s[number], number))

    def spread(self, document: int) -> None:
        """However long it takes, on as many ranks from the first on as make it fastest; all are empty."""
        problem, tokens = self.problem, int(self.problem.tokens_N[document])
        widths_W = np.arange(-(-tokens // problem.capacity), min(problem.ranks, tokens) + 1)
        width = int(widths_W[alone_s(problem.costs, tokens, widths_W).argmin()])
        evenly = place_evenly(problem, np.array([document]), first_D=0, ranks_D=width)
        self.hold(document, dict(zip(evenly.ranks_P.tolist(), evenly.shares_P.tolist(), strict=True)))
        self.limit_s = max(self.limit_s, *self.load_s)

    def made(self) -> Slot:
        """The pieces of all that it holds."""
        pieces = [(document, rank, share) for document, shares in self.held for rank, share in sorted(shares.items())]
        return Slot(*np.array(pieces, np.int64).reshape(-1, 3).T)


def ranks_needed(gaps: Iterable[tuple[int, int]], tokens: int) -> int:
    """How many of the gaps hold so many tokens; 0 when all together are too small."""
    for count, (gap, _) in enumerate(gaps):
        tokens -= gap
        if tokens <= 0:
            return count + 1
    return 0


def fill_gaps(gaps: Gaps, tokens: int) -> dict[int, int]:
    """Tokens of each rank: the largest gaps are filled, the last piece goes into the smallest that holds it."""
    shares: dict[int, int] = {}
    for at, (gap, rank) in enumerate(gaps):
        if gap >= tokens:
            last = next(other for held, other in reversed(gaps[at:]) if held >= tokens)
            return shares | {last: tokens}
        shares[rank] = gap
        tokens -= gap
    raise ValueError("the gaps are too small")
