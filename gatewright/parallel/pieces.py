"""Piece: the part of a weight that a rank holds or updates, as one run of the whole tensor's elements in row order.

Every layout cuts tensors into such runs: experts and FSDP along the first axis, ZeRO-2 anywhere. Where ranks hold
experts in another order than their numbers', a piece is several runs of the tensor in its own order. A checkpoint
written under one layout is read under any other by the overlap of runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [begin, end) of a tensor of `shape`, in row order, its rows in `order`."""

    shape: tuple[int, ...]
    """Of the whole tensor, as one process would hold it."""
    begin: int
    end: int
    order: Sequence[int] | None = None
    """The row of the tensor that lies at each position of the first axis; None: each in its own place."""
    holders: int = 1
    """Ranks that hold this very piece."""
    writes: bool = True
    """Whether this rank is the one of the holders that saves it."""

    @property
    def elements(self) -> int:
        return self.end - self.begin

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The piece as runs [begin, end) of the tensor in its own order, one after the other."""
        if self.order is None:
            return [(self.begin, self.end)]
        row, at = prod(self.shape[1:]), self.begin
        runs: list[tuple[int, int]] = []
        while at < self.end:
            position, inside = divmod(at, row)
            begin, elements = self.order[position] * row + inside, min(row - inside, self.end - at)
            if runs and runs[-1][1] == begin:
                runs[-1] = (runs[-1][0], begin + elements)
            else:
                runs.append((begin, begin + elements))
            at += elements
        return runs

    @property
    def whole(self) -> bool:
        return self.elements == prod(self.shape)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Its own shape where it is a run of whole rows of the first axis, otherwise None."""
        row = prod(self.shape[1:])
        if not self.shape or self.begin % max(row, 1) or self.end % max(row, 1):
            return None
        return (self.elements // max(row, 1), *self.shape[1:])

    def cut(self, ranks: int, rank: int) -> tuple[int, int]:
        """(begin, end) within this piece of the share of one of `ranks`: equal, but the last may be short or empty."""
        share = -(-self.elements // ranks)
        return min(rank * share, self.elements), min((rank + 1) * share, self.elements)
