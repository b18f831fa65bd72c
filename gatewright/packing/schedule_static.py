"""Candidates on aligned groups of one size: the same for the whole step, or chosen anew for each micro-batch.

Every document lies evenly on one of the groups [k · size, (k + 1) · size), so groups can be made beforehand.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from gatewright.packing.pack import pack
from gatewright.packing.schedule_score import Problem, Slot, alone_s, place_evenly

SIZES = 3
"""Wider groups only add exchange."""
TRIES = 3
"""Further micro-batches that longest-first may ask for before documents are packed without regard to their work."""


def group_sizes(problem: Problem) -> list[int]:
    """The SIZES smallest of aligned groups that can hold the longest document: those that divide the ranks evenly."""
    longest = problem.tokens[problem.longest_first[0]]
    sizes = [
        size
        for size in range(1, problem.ranks + 1)
        if problem.ranks % size == 0 and -(-longest // size) <= problem.capacity
    ]
    return sizes[:SIZES]


def static(problem: Problem, *, size: int) -> list[Slot]:
    """One group size throughout, longest document first, each where least work is among the bins with room.

    A bin is a group in a micro-batch. Bins of like work share a micro-batch.
    """
    groups = problem.ranks // size
    bins = fill_bins(problem, size=size)
    bins.sort(key=lambda documents: -sum(problem.work_s[document] for document in documents))
    return [slot_of(problem, bins[at : at + groups], size=size) for at in range(0, len(bins), groups)]


def fill_bins(problem: Problem, *, size: int) -> list[list[int]]:
    """Documents of each bin, in as few micro-batches as longest-first manages, or as best-fit does."""
    groups = problem.ranks // size
    slots = problem.fewest_slots
    for more in range(TRIES + 1):
        bins = longest_first(problem, bins=(slots + more) * groups, size=size)
        if bins is not None:
            return [documents for documents in bins if documents]
    most_N = -(-np.array([problem.tokens[document] for document in problem.longest_first]) // size)
    packs = pack(most_N, problem.capacity, thorough=False)
    return [[problem.longest_first[n] for n in packs[k].tolist()] for k in range(len(packs))]


def longest_first(problem: Problem, *, bins: int, size: int) -> list[list[int]] | None:
    """Documents of each bin of `size` ranks, balanced by seconds; None when they do not fit that way."""
    held: list[list[int]] = [[] for _ in range(bins)]
    room = [problem.capacity] * bins
    least = [(0.0, number) for number in range(bins)]
    for document in problem.longest_first:
        tokens = problem.tokens[document]
        most = -(-tokens // size)
        full = []
        while least and room[least[0][1]] < most:
            full.append(heappop(least))
        if not least:
            return None
        load, number = heappop(least)
        held[number].append(document)
        room[number] -= most
        heappush(least, (load + alone_s(problem, tokens, size), number))
        for entry in full:
            heappush(least, entry)
    return held


def slot_of(problem: Problem, bins: list[list[int]], *, size: int) -> Slot:
    """The micro-batch of these bins, one a group."""
    return [
        place_evenly(problem, document, first=group * size, ranks=size)
        for group, documents in enumerate(bins)
        for document in documents
    ]


def per_micro_batch(problem: Problem, *, fill: float) -> list[Slot]:
    """Documents of like length share a micro-batch, all on groups of the one size that makes it fastest."""
    slots: list[Slot] = []
    for documents in runs(problem, int(problem.ranks * problem.capacity * fill)):
        part = problem.only(documents)
        best: tuple[float, list[list[int]], int] | None = None
        for size in group_sizes(part):
            bins = longest_first(part, bins=problem.ranks // size, size=size)
            if bins is not None:
                seconds = max(sum(alone_s(part, part.tokens[d], size) for d in held) for held in bins)
                best = min(best or (seconds, bins, size), (seconds, bins, size), key=lambda found: found[0])
        slots += [slot_of(problem, best[1], size=best[2])] if best else static(part, size=problem.ranks)
    return slots


def runs(problem: Problem, room: int) -> Iterator[list[int]]:
    """Documents, longest first, in runs of at most `room` tokens, or of one document."""
    run: list[int] = []
    held = 0
    for document in problem.longest_first:
        if run and held + problem.tokens[document] > room:
            yield run
            run, held = [], 0
        run.append(document)
        held += problem.tokens[document]
    if run:
        yield run
