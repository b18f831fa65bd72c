"""The all-gather of keys and values: every rank of a group gets the rows of all documents that the group cuts.

More rows travel than by need (exchange.py), in one balanced collective of a small group. Rows of documents that one
rank holds whole stay at home. Each rank's part is padded to the longest, as not every backend gathers uneven ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.exchange import first_rows, no_rows
from gatewright.packing.schedule import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One rank's part in a micro-batch; rows as in exchange.Exchange."""

    size: int
    """Ranks of the aligned group."""
    share_rows: IntArray
    """Own rows of documents that are cut: what the others get."""
    most: int
    """Rows that each rank sends, padding included."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_rows: IntArray
    """Σ key_lengths: numbers in [own rows, `most` rows of rank 0, `most` rows of rank 1, …]."""


def plan_gather(slices: Sequence[Sequence[Slice]], rank: int) -> Gather:
    """The part of `rank` of a group whose ranks hold these slices. Raises ValueError where a token is nobody's."""
    cut = cut_documents(slices)
    shares = [shared_rows(held, cut) for held in slices]
    own, most = sum(piece.end - piece.start for piece in slices[rank]), max(map(len, shares))
    ends: dict[int, int] = {}
    for piece in slices[rank]:
        ends[piece.document] = max(piece.end, ends.get(piece.document, 0))
    places = {document: np.full(end, -1, np.int64) for document, end in ends.items()}
    for other, held in enumerate(slices):
        at = own + other * most
        for piece in held:
            if piece.document not in cut or other == rank:
                continue
            end = min(piece.end, ends.get(piece.document, 0))
            if end > piece.start:
                places[piece.document][piece.start : end] = np.arange(at, at + end - piece.start)
            at += piece.end - piece.start
    for piece, start in zip(slices[rank], first_rows(slices[rank]), strict=True):
        places[piece.document][piece.start : piece.end] = np.arange(start, start + piece.end - piece.start)
    key_rows = [places[piece.document][: piece.end] for piece in slices[rank]]
    if any((rows < 0).any() for rows in key_rows):
        raise ValueError(f"rank {rank} of the group looks at tokens that nobody in it holds")
    return Gather(
        size=len(slices),
        share_rows=shares[rank],
        most=most,
        query_lengths=tuple(piece.end - piece.start for piece in slices[rank]),
        key_lengths=tuple(piece.end for piece in slices[rank]),
        key_rows=np.concatenate(key_rows) if key_rows else no_rows(),
    )


def cut_documents(slices: Sequence[Sequence[Slice]]) -> set[int]:
    """Documents that more than one rank holds."""
    held = [{piece.document for piece in one} for one in slices]
    counts: dict[int, int] = {}
    for documents in held:
        for document in documents:
            counts[document] = counts.get(document, 0) + 1
    return {document for document, count in counts.items() if count > 1}


def shared_rows(held: Sequence[Slice], cut: set[int]) -> IntArray:
    """Own rows of documents that are cut, in the order in which they are held."""
    rows = [
        np.arange(start, start + piece.end - piece.start)
        for piece, start in zip(held, first_rows(held), strict=True)
        if piece.document in cut
    ]
    return np.concatenate(rows) if rows else no_rows()
