"""The candidate that fills micro-batches one after another with groups of several sizes, no rank in two groups.

The longest waiting document sets the time to keep to. Each next one goes where the slowest rank stays fastest: to the
group with least to do that has room or onto free ranks, small groups first. What would take too long waits for the
next micro-batch.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gatewright.packing.arrays import FloatArray, IntArray
from gatewright.packing.schedule_score import Problem, Slot, alone_s, place_evenly

Price = Callable[[IntArray, int], FloatArray]
"""What documents of so many tokens cost each of so many ranks, in any unit."""
SLACK = 1.05
"""Of the time to keep to."""


@dataclass(slots=True, order=True)
class Group:
    """Neighbouring ranks that share all their documents; groups stand side by side from the first rank on."""

    cost: float
    number: int
    size: int = field(compare=False)
    room: int = field(compare=False)
    """Tokens that each of its ranks can still hold."""
    documents: list[int] = field(default_factory=list, compare=False)

    def add(self, document: int, tokens: int, cost: float) -> None:
        self.documents.append(document)
        self.room -= -(-tokens // self.size)
        self.cost += cost


def by_seconds(problem: Problem) -> Price:
    return lambda tokens_N, ranks: alone_s(problem.costs, tokens_N, ranks)


def by_square(tokens_N: IntArray, ranks: int) -> FloatArray:
    """Attention alone."""
    return tokens_N.astype(np.float64) ** 2 / ranks


def sequential(problem: Problem, price: Price) -> list[Slot]:
    """Micro-batches until no document waits."""
    powers = [1 << k for k in range(problem.ranks.bit_length())]
    prices = {size: price(problem.tokens_N, size).tolist() for size in sorted({*powers, problem.ranks})}
    tokens_N, waiting, slots = problem.tokens_N.tolist(), list(range(len(problem.tokens_N))), []
    while waiting:
        groups, left = fill_groups(problem, waiting, tokens_N, prices)
        if not widen(problem, groups, list(prices)):
            groups, left = fill_all_ranks(problem, waiting, tokens_N)
        slots.append(placed(problem, groups))
        waiting = left
    return slots


def fill_groups(
    problem: Problem, waiting: list[int], tokens_N: list[int], prices: dict[int, list[float]]
) -> tuple[list[Group], list[int]]:
    """Groups of one micro-batch, and the documents that wait on."""
    longest, capacity = tokens_N[waiting[0]], problem.capacity
    fewest = next(size for size in prices if longest <= size * capacity)
    slowest = prices[fewest][waiting[0]]
    limit = SLACK * slowest * capacity * fewest / longest
    groups: dict[int, list[Group]] = {size: [] for size in prices}
    free, left, refused = problem.ranks, list[int](), 0
    for number, document in enumerate(waiting):
        tokens = tokens_N[document]
        if tokens == refused:
            left.append(document)
            continue
        chosen, soonest = None, limit
        for size in prices if number else [fewest]:
            if tokens > size * capacity:
                continue
            cost, each = prices[size][document], -(-tokens // size)
            group = next((group for group in groups[size] if group.room >= each), None)
            if free >= size and (group is None or group.cost + cost > slowest):
                group = Group(0.0, number, size, capacity)
            if group is not None:
                then = max(slowest, group.cost + cost)
                if then < soonest or (chosen is None and then == limit):
                    chosen, soonest = group, then
                if soonest <= slowest:
                    break
        if chosen is None:
            refused = tokens
            left.append(document)
            continue
        slowest, same = soonest, groups[chosen.size]
        if chosen.documents:
            same.remove(chosen)
        else:
            free -= chosen.size
        chosen.add(document, tokens, prices[chosen.size][document])
        insort(same, chosen)
    return [group for same in groups.values() for group in same], left


def fill_all_ranks(problem: Problem, waiting: list[int], tokens_N: list[int]) -> tuple[list[Group], list[int]]:
    """One group of all ranks with as many documents as it holds, and the others."""
    group, left = Group(0.0, 0, problem.ranks, problem.capacity), []
    for document in waiting:
        if -(-tokens_N[document] // problem.ranks) <= group.room:
            group.add(document, tokens_N[document], 0.0)
        else:
            left.append(document)
    return [group], left


def widen(problem: Problem, groups: list[Group], sizes: list[int]) -> bool:
    """Double the smallest groups until no rank is free; False when that cannot be."""
    free = problem.ranks - sum(group.size for group in groups)
    while free:
        smallest = min(group.size for group in groups)
        wider = next((size for size in sizes if size > smallest), 0)
        if not wider or wider - smallest > free:
            return False
        group = next(group for group in groups if group.size == smallest)
        group.size = wider
        free -= wider - smallest
    return True


def placed(problem: Problem, groups: list[Group]) -> Slot:
    size_G = np.array([group.size for group in groups])
    group_D = np.repeat(np.arange(len(groups)), [len(group.documents) for group in groups])
    documents_D = np.array([document for group in groups for document in group.documents])
    first_G = np.cumsum(size_G) - size_G
    return place_evenly(problem, documents_D, first_D=first_G[group_D], ranks_D=size_G[group_D])
