"""Packs filled one after another to the last token: for lengths of which best-fit leaves gaps that nothing fills.

A pack takes the longest document left, then the longest that fits, until two more can complete it: two that fill it
exactly, or else come closest. What a pack holds is repeated as often as there are documents of these lengths, so effort
grows with the lengths that differ, not with the documents. Short documents stay for the end, where they are scarce.
"""

from dataclasses import dataclass

import numpy as np

from gatewright.packing.arrays import IntArray

MOST_KINDS = 20_000
"""Packs of different content after which it is given up: it would take longer than it is worth."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Documents, longest first: `packs[j]` packs from `first_pack[j]` on take the next `each[j]` documents each."""

    first_pack: list[int]
    packs: list[int]
    each: list[int]
    total_packs: int


def fill_exactly(count_L: IntArray, capacity: int, *, commonest: bool) -> Placed | None:
    """`count_L[n]` documents of n tokens in packs; None where too many kinds of packs would be needed.

    commonest: of several pairs that complete a pack the one whose lengths occur most often, instead of the longest.
    """
    count_L = np.pad(count_L, (0, max(0, capacity + 1 - len(count_L))))
    rows: list[tuple[int, int, int, int]] = []
    """(length, first pack, packs, documents of it in each)."""
    total = 0
    for _ in range(MOST_KINDS):
        present = np.flatnonzero(count_L)
        if not len(present):
            rows.sort(key=lambda row: -row[0])
            return Placed([r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows], total)
        lengths, each = np.unique(one_pack(count_L, present, capacity, commonest=commonest), return_counts=True)
        packs = int((count_L[lengths] // each).min())
        count_L[lengths] -= packs * each
        rows += [(length, total, packs, n) for length, n in zip(lengths.tolist(), each.tolist(), strict=True)]
        total += packs
    return None


def one_pack(count_L: IntArray, present: IntArray, capacity: int, *, commonest: bool) -> list[int]:
    """Lengths in one pack, of those present."""
    left_L = count_L.copy()
    held = [int(present[-1])]
    room = capacity - held[0]
    left_L[held[0]] -= 1
    while room >= present[0]:
        fits = present[: np.searchsorted(present, room, side="right")]
        fits = fits[left_L[fits] > 0]
        if not len(fits):
            break
        longest = int(fits[-1])
        taken = [longest] if 2 * longest < room else last_two(left_L, fits, room, commonest=commonest)
        for length in taken:
            left_L[length] -= 1
            room -= length
        held += taken
    return held


def last_two(left_L: IntArray, fits: IntArray, room: int, *, commonest: bool) -> list[int]:
    """One or two of the lengths that fit which fill the room, or as much of it as any two do."""
    rest = room - fits
    partners = np.where(rest > 0, left_L[rest] - (rest == fits), np.where(rest == 0, left_L[fits], 0))
    exact = np.flatnonzero(partners > 0)
    if len(exact):
        best = exact[np.minimum(left_L[fits[exact]], partners[exact]).argmax()] if commonest else exact[-1]
        return [int(length) for length in (fits[best], rest[best]) if length]
    at = np.searchsorted(fits, rest, side="right") - 1
    partner = np.where(at >= 0, fits[at], 0)
    partner = np.where((partner == fits) & (left_L[fits] < 2), 0, partner)
    best = (fits + partner).argmax()
    return [int(length) for length in (fits[best], partner[best]) if length]
