"""Megatron-LM's two schedulers of packed sequences, written anew from their description, on our cost model.

`dp_balanced`: documents in the order of arrival are packed next-fit, at one CP size for the step. The default dynamic
scheduler of the development branch forms one micro-batch after another, longest document first, with groups of powers
of two; it prices a document of s tokens on c ranks at s² / c, attention alone. Groups stand side by side.
"""

import numpy as np

from gatewright.packing.schedule_score import Problem, Slot, place_evenly

Groups = list[tuple[int, list[int]]]


def dp_balanced(problem: Problem, *, arrival: list[int]) -> list[Slot]:
    """Next-fit in the order of arrival, at the smallest power of two that holds the longest document."""
    size = static_size(problem)
    bins: list[list[int]] = []
    room, tokens_N = 0, problem.tokens_N.tolist()
    for document in arrival:
        tokens = tokens_N[document]
        if tokens > room:
            bins.append([])
            room = size * problem.capacity
        bins[-1].append(document)
        room -= tokens
    groups = problem.ranks // size
    return [slot(problem, [(size, held) for held in bins[at : at + groups]]) for at in range(0, len(bins), groups)]


def static_size(problem: Problem) -> int:
    """The smallest power of two that holds the longest document; where that does not divide the ranks, all of them."""
    size = 1
    while size * problem.capacity < problem.longest:
        size *= 2
    return size if problem.ranks % size == 0 else problem.ranks


def dynamic(problem: Problem) -> list[Slot]:
    """Micro-batches of the default dynamic scheduler until no document is left."""
    sizes = sorted({1 << k for k in range(problem.ranks.bit_length())} | {problem.ranks})
    left, slots = list(range(len(problem.tokens_N))), []
    while left:
        groups, left = one_micro_batch(problem, left, sizes)
        slots.append(slot(problem, groups))
    return slots


def one_micro_batch(problem: Problem, documents: list[int], sizes: list[int]) -> tuple[Groups, list[int]]:
    """The first document on its smallest group sets a cap of 1.05 × its tokens × a rank's room on each rank's price.

    Each next one takes, of all sizes that hold it, small ones first, and of all groups of that size and the free
    ranks, the place with the lowest price of the dearest rank; without one below the cap it is left over.
    """
    price, held, tokens_each, size_of = [], [], [], []
    free = problem.ranks
    tokens_N = problem.tokens_N.tolist()
    cap = tokens_N[documents[0]] * problem.capacity * 1.05
    left = []
    for document in documents:
        tokens = tokens_N[document]
        dearest = max(price, default=0.0)
        places = []
        for size in sizes:
            if tokens > size * problem.capacity:
                continue
            own = tokens * tokens / size
            places += [
                (max(dearest, price[k] + own), size, k)
                for k in range(len(price))
                if size_of[k] == size and tokens_each[k] + tokens / size <= problem.capacity
            ]
            if free >= size:
                places.append((max(dearest, own), size, -1))
            if not price:
                break  # the first document lies on its smallest group
        cheapest = min(places, key=lambda place: place[0], default=None)
        if cheapest is None or cheapest[0] > cap:
            left.append(document)
            continue
        _, size, k = cheapest
        if k < 0:
            k = len(price)
            price.append(0.0), held.append([]), tokens_each.append(0.0), size_of.append(size)
            free -= size
        price[k] += tokens * tokens / size
        tokens_each[k] += tokens / size
        held[k].append(document)
    while free:
        smallest = min(size_of)
        wider = next((size for size in sizes if size > smallest), None)
        if wider is None or wider - smallest > free:
            return on_all_ranks(problem, documents)
        size_of[size_of.index(smallest)] = wider
        free -= wider - smallest
    return list(zip(size_of, held, strict=True)), left


def on_all_ranks(problem: Problem, documents: list[int]) -> tuple[Groups, list[int]]:
    """What it falls back on when ranks would stay empty: one group of all, filled longest first."""
    inside, left, each = [], [], 0.0
    for document in documents:
        more = int(problem.tokens_N[document]) / problem.ranks
        if each + more <= problem.capacity:
            inside.append(document)
            each += more
        else:
            left.append(document)
    return [(problem.ranks, inside)], left


def slot(problem: Problem, groups: Groups) -> Slot:
    """Groups side by side from the first rank on."""
    size_G = np.array([size for size, _ in groups])
    group_D = np.repeat(np.arange(len(groups)), [len(documents) for _, documents in groups])
    documents_D = np.array([document for _, documents in groups for document in documents])
    first_G = np.cumsum(size_G) - size_G
    return place_evenly(problem, documents_D, first_D=first_G[group_D], ranks_D=size_G[group_D])
