"""Piece: the part of a weight that a rank holds or updates, as one run of the whole tensor's elements in row order.

Every layout cuts tensors into such runs: experts and FSDP along the first axis, ZeRO-2 anywhere. Where ranks hold
experts in another order than their numbers', a piece is several runs of the tensor in its own order. A checkpoint
written under one layout is read under any other by the overlap of runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a tensor of `shape`, in its own row order: runs [begin, end), one after the other."""

    shape: tuple[int, ...]
    """Of the whole tensor, as one process would hold it."""
    runs: list[tuple[int, int]]

    @property
    def elements(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    @property
    def whole(self) -> bool:
        """Whether it is the tensor as it is."""
        return self.runs == [(0, prod(self.shape))]

    def in_blocks(self, size: int) -> "Part":
        """The same in blocks of so many elements, those of which it has only some included."""
        return Part((-(-prod(self.shape) // size),), [(begin // size, -(-end // size)) for begin, end in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [begin, end) of a tensor of `shape`, in row order, its rows in `order`."""

    shape: tuple[int, ...]
    """Of the whole tensor, as one process would hold it."""
    begin: int
    end: int
    order: Sequence[int] | None = None
    """The row of the tensor that lies at each position of the first axis; None: each in its own place."""
    grain: int = 0
    """Ranks cut the tensor at multiples of so many of its elements only; 0: nowhere."""
    holders: int = 1
    """Ranks that hold this very piece."""
    writes: bool = True
    """Whether this rank is the one of the holders that saves it."""

    @property
    def elements(self) -> int:
        return self.end - self.begin

    @property
    def part(self) -> Part:
        """The same in the tensor's own order."""
        if self.order is None:
            return Part(self.shape, [(self.begin, self.end)])
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
        return Part(self.shape, runs)

    def cut(self, ranks: int, rank: int, *, unit: int) -> tuple[int, int]:
        """(begin, end) within this piece of the share of one of `ranks`; the last may be short or empty."""
        share = share_elements(self.elements, ranks=ranks, unit=unit)
        return min(rank * share, self.elements), min((rank + 1) * share, self.elements)


def share_elements(elements: int, *, ranks: int, unit: int) -> int:
    """Elements of the first rank's share, a multiple of `unit`: all have as many, while there are enough."""
    return -(-elements // (ranks * unit)) * unit
