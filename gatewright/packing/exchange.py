"""Who sends which rows of keys and values to whom, so that every rank can attend from its slices; integers only.

A rank that holds tokens [a, b) of a document needs the document's keys and values [0, b), and no others: under the
causal mask the rest is never looked at. The ranks that hold them send them, each row once to each rank that needs it,
in one exchange for all documents of the micro-batch, however they are cut and whichever ranks share them.

    rank 0 holds A[0, 4) and A[12, 16)     gets A[4, 8) from rank 1, A[8, 12) from rank 1
    rank 1 holds A[4, 12)                  gets A[0, 4) from rank 0
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.schedule import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One rank's part in a micro-batch. Rows are tokens, in the order in which the rank holds its slices."""

    send_rows: tuple[IntArray, ...]
    """[ranks] Own rows that go to each rank."""
    receive_counts: tuple[int, ...]
    """[ranks] Rows that come from each."""
    query_lengths: tuple[int, ...]
    """Tokens of each slice."""
    key_lengths: tuple[int, ...]
    """Tokens that each slice looks at, itself the last of them."""
    key_rows: IntArray
    """Σ key_lengths: for each slice its document's rows from the first on, as numbers in [own rows, received rows]."""

    @property
    def sends(self) -> int:
        """Rows sent to all others together."""
        return sum(len(rows) for rows in self.send_rows)


def plan_exchange(slices: Sequence[Sequence[Slice]], rank: int) -> Exchange:
    """The part of `rank` when each rank holds these slices.

    Raises ValueError where a slice looks at tokens that nobody holds.
    """
    reach = [_reach(held) for held in slices]
    starts = [first_rows(held) for held in slices]
    send_rows = tuple(
        no_rows() if other == rank else _rows_for(slices[rank], starts[rank], reach[other])
        for other in range(len(slices))
    )
    # Place of every token of a document in [own rows, received rows].
    places = {document: np.full(end, -1, np.int64) for document, end in reach[rank].items()}
    for piece, start in zip(slices[rank], starts[rank], strict=True):
        places[piece.document][piece.start : piece.end] = np.arange(start, start + piece.end - piece.start)
    at = sum(piece.end - piece.start for piece in slices[rank])
    receive_counts = [0] * len(slices)
    for other, held in enumerate(slices):
        if other == rank:
            continue
        for piece in held:
            end = min(piece.end, reach[rank].get(piece.document, 0))
            if end > piece.start:
                places[piece.document][piece.start : end] = np.arange(at, at + end - piece.start)
                at += end - piece.start
                receive_counts[other] += end - piece.start
    key_rows = [places[piece.document][: piece.end] for piece in slices[rank]]
    for piece, rows in zip(slices[rank], key_rows, strict=True):
        if (missing := np.flatnonzero(rows < 0)).size:
            raise ValueError(f"nobody holds token {missing[0]} of document {piece.document}, which {piece} looks at")
    return Exchange(
        send_rows=send_rows,
        receive_counts=tuple(receive_counts),
        query_lengths=tuple(piece.end - piece.start for piece in slices[rank]),
        key_lengths=tuple(piece.end for piece in slices[rank]),
        key_rows=np.concatenate(key_rows) if key_rows else no_rows(),
    )


def _reach(held: Sequence[Slice]) -> dict[int, int]:
    """Document -> how far a rank that holds these slices looks into it."""
    reach: dict[int, int] = {}
    for piece in held:
        reach[piece.document] = max(piece.end, reach.get(piece.document, 0))
    return reach


def first_rows(held: Sequence[Slice]) -> list[int]:
    """First row of each slice."""
    ends = np.cumsum([0] + [piece.end - piece.start for piece in held])
    return [int(end) for end in ends[:-1]]


def _rows_for(held: Sequence[Slice], starts: Sequence[int], reach: dict[int, int]) -> IntArray:
    """Rows of these slices that a rank which looks so far needs."""
    rows = [
        np.arange(start, start + min(piece.end, reach.get(piece.document, 0)) - piece.start)
        for piece, start in zip(held, starts, strict=True)
        if reach.get(piece.document, 0) > piece.start
    ]
    return np.concatenate(rows) if rows else no_rows()


def no_rows() -> IntArray:
    return np.empty(0, np.int64)
