"""The candidate that fills micro-batches one after another with groups of several sizes, no rank in two groups.

The longest waiting document sets the time to keep to. Each next one goes where the slowest rank stays fastest: to a
group that is there or onto free ranks, small groups first. What would take too long waits for the next micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gatewright.packing.schedule_score import Problem, Slot, alone_s, place_evenly

Price = Callable[[int, int], float]
"""What a document of so many tokens costs each of so many ranks, in any unit."""
SLACK = 1.05
"""Of the time to keep to."""


@dataclass(slots=True)
class Group:
    """Neighbouring ranks that share all their documents; groups stand side by side from the first rank on."""

    size: int
    cost: float = 0.0
    tokens: int = 0
    """Of the rank that holds most."""
    documents: list[int] = field(default_factory=list)

    def holds(self, tokens: int, capacity: int) -> bool:
        return self.tokens - (-tokens // self.size) <= capacity

    def add(self, document: int, tokens: int, cost: float) -> None:
        self.documents.append(document)
        self.tokens += -(-tokens // self.size)
        self.cost += cost


def by_seconds(problem: Problem) -> Price:
    return lambda tokens, ranks: float(alone_s(problem.costs, tokens, ranks))


def by_square(tokens: int, ranks: int) -> float:
    """Attention alone."""
    return tokens * tokens / ranks


def sequential(problem: Problem, price: Price) -> list[Slot]:
    """Micro-batches until no document waits."""
    powers = [1 << k for k in range(problem.ranks.bit_length())]
    sizes = sorted({*powers, problem.ranks})
    tokens_N = problem.tokens_N.tolist()
    waiting, slots = list(range(len(problem.tokens_N))), []
    while waiting:
        groups, left = fill_groups(problem, waiting, tokens_N, price, sizes)
        if not widen(problem, groups, sizes):
            groups, left = fill_all_ranks(problem, waiting, tokens_N)
        slots.append(placed(problem, groups))
        waiting = left
    return slots


def fill_groups(problem: Problem, waiting: list[int], tokens_N: list[int], price: Price, sizes: list[int]) -> tuple[list[Group], list[int]]:
    """Groups of one micro-batch, and the documents that wait on."""
    groups: list[Group] = []
    left: list[int] = []
    longest = tokens_N[waiting[0]]
    fewest = next(size for size in sizes if longest <= size * problem.capacity)
    slowest = price(longest, fewest)
    limit = SLACK * slowest * problem.capacity * fewest / longest
    groups.append(Group(fewest))
    groups[0].add(waiting[0], longest, slowest)
    free = problem.ranks - fewest
    for document in waiting[1:]:
        tokens = tokens_N[document]
        chosen: Group | None = None
        soonest = limit
        for size in sizes:
            if tokens > size * problem.capacity:
                continue
            cost = price(tokens, size)
            same = [group for group in groups if group.size == size]
            for group in [*same, Group(size)] if free >= size else same:
                then = max(slowest, group.cost + cost)
                if (then < soonest or (chosen is None and then == limit)) and group.holds(tokens, problem.capacity):
                    chosen, soonest = group, then
                if chosen and soonest <= slowest:
                    break
            if chosen and soonest <= slowest:
                break
        if chosen is None:
            left.append(document)
            continue
        slowest = soonest
        if not chosen.documents:
            groups.append(chosen)
            free -= chosen.size
        chosen.add(document, tokens, price(tokens, chosen.size))
    return groups, left


def fill_all_ranks(problem: Problem, waiting: list[int], tokens_N: list[int]) -> tuple[list[Group], list[int]]:
    """One group of all ranks with as many documents as it holds, and the others."""
    group, left = Group(problem.ranks), []
    for document in waiting:
        tokens = tokens_N[document]
        if group.holds(tokens, problem.capacity):
            group.add(document, tokens, 0.0)
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
