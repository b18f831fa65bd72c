"""The exchange of heads (Ulysses): tokens of all ranks of a group come together, for a part of the heads on each.

    rank 0   tokens 0 … 3, heads a b        tokens 0 … 7, head a
    rank 1   tokens 4 … 7, heads a b   →    tokens 0 … 7, head b

Each rank then attends over whole documents, with equal work; the outputs go the same way back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.exchange import first_rows, no_rows
from gatewright.packing.schedule import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadExchange:
    """A group's exchange in a micro-batch; the same on each of its ranks but for `rank`."""

    size: int
    """Ranks of the aligned group."""
    rank: int
    """This one's number in it."""
    counts: tuple[int, ...]
    """[ranks] Tokens that each holds."""
    lengths: tuple[int, ...]
    """Tokens of each document of the group, by number."""
    order: IntArray
    """Σ lengths: the documents' tokens in order, as rows of [rank 0's tokens, rank 1's tokens, …]."""


def plan_heads(slices: Sequence[Sequence[Slice]], rank: int) -> HeadExchange:
    """The exchange of a group whose ranks hold these slices. Raises ValueError where a token is nobody's."""
    counts = [sum(piece.end - piece.start for piece in held) for held in slices]
    pieces, begin = [], 0
    for held, count in zip(slices, counts, strict=True):
        pieces += [(piece, begin + start) for piece, start in zip(held, first_rows(held), strict=True)]
        begin += count
    lengths: dict[int, int] = {}
    for piece, _ in sorted(pieces):
        if piece.start != lengths.get(piece.document, 0):
            raise ValueError(f"nobody in the group holds what precedes {piece}")
        lengths[piece.document] = piece.end
    order = [np.arange(row, row + piece.end - piece.start) for piece, row in sorted(pieces)]
    return HeadExchange(
        size=len(slices),
        rank=rank,
        counts=tuple(counts),
        lengths=tuple(lengths.values()),
        order=np.concatenate(order) if order else no_rows(),
    )
