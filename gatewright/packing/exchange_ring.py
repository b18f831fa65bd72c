"""The ring: keys and values of each rank's cut documents pass from rank to rank; who attends to what at which step.

At step s a rank sees the block of the rank s before it. Slices are mirrored pairs of chunks (schedule.py), so at every
step about the same share of queries and keys lies under the causal mask on all ranks; pairs above it are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gatewright.packing.arrays import IntArray
from gatewright.packing.exchange import first_rows
from gatewright.packing.exchange_gather import cut_documents, shared_rows
from gatewright.packing.schedule import Slice


class Pair(NamedTuple):
    """Queries [query, query + queries) of the own rows, and keys [key, key + keys) of a block."""

    query: int
    queries: int
    key: int
    keys: int
    ahead: int
    """Place of the first query in its document less that of the first key; 0: the slice itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingExchange:
    """One rank's part in a micro-batch."""

    size: int
    """Ranks of the aligned group."""
    rank: int
    """This one's number in it."""
    travel_rows: IntArray
    """Own rows that go round."""
    counts: tuple[int, ...]
    """[ranks] Rows of each rank's block."""
    pairs: tuple[tuple[Pair, ...], ...]
    """[steps] At step 0 keys are all own rows, later those of the block that has come."""


def plan_ring(slices: Sequence[Sequence[Slice]], rank: int) -> RingExchange:
    """The part of `rank` of a group whose ranks hold these slices."""
    size, cut = len(slices), cut_documents(slices)
    own = _rows(slices[rank])
    blocks = [_rows([piece for piece in held if piece.document in cut]) for held in slices]
    steps = [own] + [blocks[(rank - step) % size] for step in range(1, size)]
    return RingExchange(
        size=size,
        rank=rank,
        travel_rows=shared_rows(slices[rank], cut),
        counts=tuple(sum(piece.end - piece.start for piece, _ in block) for block in blocks),
        pairs=tuple(_pairs(own, block) for block in steps),
    )


def _rows(held: Sequence[Slice]) -> list[tuple[Slice, int]]:
    return list(zip(held, first_rows(held), strict=True))


def _pairs(own: Sequence[tuple[Slice, int]], block: Sequence[tuple[Slice, int]]) -> tuple[Pair, ...]:
    """Each own slice with those of its document that are not after it; itself first, where every query sees a key."""
    found = [
        Pair(row, query.end - query.start, at, key.end - key.start, query.start - key.start)
        for query, row in own
        for key, at in block
        if key.document == query.document and key.start <= query.start
    ]
    return tuple(sorted(found, key=lambda pair: pair.ahead > 0))
