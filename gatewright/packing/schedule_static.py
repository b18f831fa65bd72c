"""Candidates on aligned groups of one size: the same for the whole step, or chosen anew for each micro-batch.

Every document lies evenly on one of the groups [k · size, (k + 1) · size), so groups can be made beforehand.
"""

import math
from collections.abc import Iterator

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.pack import pack
from gatewright.packing.schedule_deal import deal
from gatewright.packing.schedule_score import Problem, Slot, alone_s, place_evenly

SIZES = 3
"""Wider groups only add exchange."""
TRIES = 3
"""Further micro-batches that longest-first may ask for before documents are packed without regard to their work."""


def group_sizes(problem: Problem, longest: int) -> list[int]:
    """The SIZES smallest of aligned groups that can hold a document: those that divide the ranks evenly."""
    ranks = problem.ranks
    sizes = (size for size in range(1, ranks + 1) if ranks % size == 0 and longest <= size * problem.capacity)
    return [size for size, _ in zip(sizes, range(SIZES), strict=False)]


def static(problem: Problem, *, size: int) -> list[Slot]:
    """One group size throughout, longest document first, each where least work is among the bins with room.

    A bin is a group in a micro-batch. Bins of like work share a micro-batch.
    """
    documents_N = np.arange(len(problem.tokens_N))
    bins_N = fill_bins(problem, documents_N, size=size)
    load_B = np.bincount(bins_N, problem.works_N)
    place_B = np.empty(len(load_B), np.int64)
    place_B[np.argsort(-load_B, kind="stable")] = np.arange(len(load_B))
    return slots_of(problem, documents_N, place_B[bins_N], size=size)


def slots_of(problem: Problem, documents_D: IntArray, bins_D: IntArray, *, size: int) -> list[Slot]:
    """Micro-batches of documents by the bin of each, one bin a group."""
    slots_D, groups_D = np.divmod(bins_D, problem.ranks // size)
    slots = (slots_D == slot for slot in range(int(slots_D.max()) + 1))
    return [
        place_evenly(problem, documents_D[held_D], first_D=groups_D[held_D] * size, ranks_D=size) for held_D in slots
    ]


def fill_bins(problem: Problem, documents_D: IntArray, *, size: int) -> IntArray:
    """The bin of each document, in as few micro-batches as longest-first manages, or as best-fit does."""
    groups = problem.ranks // size
    tokens = int(problem.tokens_N[documents_D].sum())
    fewest = -(-tokens // (problem.ranks * problem.capacity))
    for slots in range(fewest, fewest + TRIES + 1):
        bins_D, _ = longest_first(problem, documents_D, bins=slots * groups, size=size)
        if bins_D.min() >= 0:
            return np.unique(bins_D, return_inverse=True)[1]
    packs = pack(-(-problem.tokens_N[documents_D] // size), problem.capacity, thorough=False)
    for number in range(len(packs)):
        bins_D[packs[number]] = number
    return bins_D


def longest_first(problem: Problem, documents_D: IntArray, *, bins: int, size: int) -> tuple[IntArray, float]:
    """The bin of `size` ranks of each document, balanced by seconds, -1 for one that does not fit that way;
    and the seconds of the slowest."""
    tokens_D = problem.tokens_N[documents_D]
    load_B, room_B = np.zeros(bins), np.full(bins, problem.capacity)
    bins_D = deal(alone_s(problem.costs, tokens_D, size), -(-tokens_D // size), load_B, room_B, math.inf)
    return bins_D, float(load_B.max())


def per_micro_batch(problem: Problem, *, fill: float) -> list[Slot]:
    """Documents of like length share a micro-batch, all on groups of the one size that makes it fastest."""
    slots: list[Slot] = []
    for documents_D in runs(problem, int(problem.ranks * problem.capacity * fill)):
        best: tuple[float, int, IntArray] | None = None
        for size in group_sizes(problem, int(problem.tokens_N[documents_D[0]])):
            bins_D, seconds = longest_first(problem, documents_D, bins=problem.ranks // size, size=size)
            if bins_D.min() >= 0 and (best is None or seconds < best[0]):
                best = seconds, size, bins_D
        _, size, bins_D = best or (0.0, problem.ranks, fill_bins(problem, documents_D, size=problem.ranks))
        slots += slots_of(problem, documents_D, bins_D, size=size)
    return slots


def runs(problem: Problem, room: int) -> Iterator[IntArray]:
    """Documents, longest first, in runs of at most `room` tokens, or of one document."""
    up_to_N = np.cumsum(problem.tokens_N)
    first = 0
    while first < len(up_to_N):
        held = int(up_to_N[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(up_to_N, held + room, side="right")))
        yield np.arange(first, end)
        first = end
