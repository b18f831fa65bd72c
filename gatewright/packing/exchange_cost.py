"""Which exchange a micro-batch makes: bytes and messages of each that is possible, and the cheapest of them.

Everything here follows from numbers that all ranks know, so all choose the same. Only what differs between the
exchanges counts: the attention itself is left out. Rows are tokens; R is a group's ranks, T a rank's tokens.

    moved      rows sent or received by need, all documents at once, over all ranks            2 passes
    gathered   (R − 1) · the most rows of cut documents that a rank of the group holds         2 passes
    heads      (R − 1) / R · T rows of queries, keys, values and outputs                       2 passes
    ring       (R − 1) · the most rows of cut documents, beside computation                    3 passes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gatewright.packing.cost import BYTES, Rates
from gatewright.packing.exchange_gather import cut_documents
from gatewright.packing.schedule import Slice

Name = Literal["moved", "gathered", "heads", "ring"]
Slices = Sequence[Sequence[Slice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Widths of a layer's attention."""

    query_heads: int | None
    """None: they differ between layers, and are not to be dealt to ranks."""
    key_heads: int
    qk_dim: int
    v_dim: int

    @property
    def kept(self) -> int:
        """Elements of a token's keys and values."""
        return self.key_heads * (self.qk_dim + self.v_dim)

    def dealt(self, ranks: int) -> int:
        """Elements of a token's queries, keys, values and outputs, key/value heads repeated until ranks divide them."""
        assert self.query_heads is not None
        return (self.query_heads + math.lcm(self.key_heads, ranks)) * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of one exchange in a layer, forward and backward, for the rank that has most of it."""

    name: Name
    bytes: float
    messages: int
    seconds: float


def choose(slices: Slices, *, heads: Heads, rates: Rates, among: Sequence[Name]) -> tuple[Name, int] | None:
    """The cheapest of these exchanges that is possible, and its ranks; None where no document is cut.

    `moved` is always possible, and taken where none of `among` is.
    """
    size = aligned_size(slices)
    if size == 1:
        return None
    offered = [price for price in prices(slices, size, heads=heads, rates=rates) if price.name in among]
    # The order of `prices` settles ties.
    name = min(offered, key=lambda price: price.seconds).name if offered else "moved"
    return name, len(slices) if name == "moved" else size


def aligned_size(slices: Slices) -> int:
    """Ranks of the smallest aligned groups [k · size, (k + 1) · size) that no document is shared beyond; 1: all whole.

    All ranks together are such a group.
    """
    spans: dict[int, tuple[int, int]] = {}
    for rank, held in enumerate(slices):
        for piece in held:
            spans[piece.document] = (spans.get(piece.document, (rank, rank))[0], rank)
    ranks = len(slices)
    return next(
        size
        for size in range(1, ranks + 1)
        if ranks % size == 0 and all(first // size == last // size for first, last in spans.values())
    )


def prices(slices: Slices, size: int, *, heads: Heads, rates: Rates) -> list[Price]:
    """Of each exchange that is possible over aligned groups of this size."""
    blocks = [slices[first : first + size] for first in range(0, len(slices), size)]
    cut = [cut_documents(block) for block in blocks]
    blocks, cut = [b for b, c in zip(blocks, cut, strict=True) if c], [c for c in cut if c]
    most = max(_tokens(held, only) for block, only in zip(blocks, cut, strict=True) for held in block)
    kept = BYTES * heads.kept
    rows, peers = _needed(slices)
    near = rates.near_bytes_per_s if len(slices) <= rates.ranks_per_node else rates.far_bytes_per_s
    group = rates.near_bytes_per_s if rates.ranks_per_node % size == 0 else rates.far_bytes_per_s

    def price(name: Name, amount: float, messages: int, *, per_s: float, shown: float = 1.0) -> Price:
        seconds = (amount / per_s + messages * rates.hop_s) * shown
        return Price(name=name, bytes=amount, messages=messages, seconds=seconds)

    found = [
        price("moved", 2 * kept * rows, 2 * peers, per_s=near),
        price("gathered", 2 * kept * (size - 1) * most, 2 * (size - 1), per_s=group),
        price("ring", 3 * kept * (size - 1) * most, 3 * (size - 1), per_s=group, shown=1 - rates.hidden),
    ]
    if heads.query_heads is not None and heads.query_heads % size == 0:
        tokens = max(_tokens(held) for block in blocks for held in block)
        dealt = 2 * BYTES * heads.dealt(size) * tokens * (size - 1) / size
        found.append(price("heads", dealt, 4 * (size - 1), per_s=group))
    return found


def _tokens(held: Sequence[Slice], only: set[int] | None = None) -> int:
    return sum(piece.end - piece.start for piece in held if only is None or piece.document in only)


def _needed(slices: Slices) -> tuple[int, int]:
    """Rows that a rank sends or receives at most when each gets what it looks at, and ranks it then talks to."""
    ranks = len(slices)
    reach: list[dict[int, int]] = []
    sharers: dict[int, list[int]] = {}
    for rank, held in enumerate(slices):
        ends: dict[int, int] = {}
        for piece in held:
            ends[piece.document] = max(piece.end, ends.get(piece.document, 0))
        reach.append(ends)
        for document in ends:
            sharers.setdefault(document, []).append(rank)
    sent, received, peers = [0] * ranks, [0] * ranks, [set[int]() for _ in range(ranks)]
    for rank, held in enumerate(slices):
        for piece in held:
            for other in sharers[piece.document]:
                rows = min(piece.end, reach[other][piece.document]) - piece.start
                if other != rank and rows > 0:
                    sent[rank] += rows
                    received[other] += rows
                    peers[rank].add(other)
                    peers[other].add(rank)
    return max(sent + received), max(map(len, peers))
