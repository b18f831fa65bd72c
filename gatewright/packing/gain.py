"""What packing, or a limit on the length, saves: documents priced by their tokens and by the square of their length.

A token of a document of N tokens costs 1 + N / knee: everything but attention is 1, attention grows with the tokens it
looks back on, and at a length of `knee` it costs as much as all the rest. Costs are in tokens of a very short document.
"""

from dataclasses import dataclass

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.lengths import padded_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitGain:
    """How many times faster an epoch is under a limit than without, and what is lost by truncating to it."""

    limit_tokens: int
    hoped: float
    """If every document were as long as the longest: what halving the limit is often believed to give."""
    padded: float
    """In batches that are padded to their own longest document, with the limit and without."""
    packed: float
    """In packs, with the limit and without."""
    tokens_lost: int


def packed_cost(lengths_N: IntArray, *, knee_tokens: int | None) -> float:
    """Of documents on one token axis: each looks back on itself alone. `knee_tokens` None: attention is free."""
    lengths = lengths_N.astype(np.float64)
    squares = float((lengths**2).sum()) / knee_tokens if knee_tokens else 0.0
    return float(lengths.sum()) + squares


def padded_cost(lengths_N: IntArray, *, batch_size: int, knee_tokens: int | None) -> float:
    """Of batches of `batch_size` documents in random order; a document costs as much as the longest beside it."""
    return packed_cost(padded_lengths(lengths_N, batch_size=batch_size), knee_tokens=knee_tokens)


def packing_gain(lengths_N: IntArray, *, batch_size: int, knee_tokens: int | None) -> float:
    """How many times faster packs are than padded batches, counting arithmetic only; 1 for no documents."""
    packed = packed_cost(lengths_N, knee_tokens=knee_tokens)
    return padded_cost(lengths_N, batch_size=batch_size, knee_tokens=knee_tokens) / packed if packed else 1.0


def limit_gain(lengths_N: IntArray, limit_tokens: int, *, batch_size: int, knee_tokens: int | None) -> LimitGain:
    """What truncating to `limit_tokens` gains and loses. Raises ValueError for no documents or a limit below 1."""
    if not len(lengths_N) or limit_tokens < 1:
        raise ValueError(f"{len(lengths_N)} documents and a limit of {limit_tokens} tokens; wanted at least 1 of each")
    cut_N = np.minimum(lengths_N, limit_tokens)

    def gain(before_N: IntArray, after_N: IntArray) -> float:
        return packed_cost(before_N, knee_tokens=knee_tokens) / packed_cost(after_N, knee_tokens=knee_tokens)

    def padded(of_N: IntArray) -> IntArray:
        return padded_lengths(of_N, batch_size=batch_size)

    return LimitGain(
        limit_tokens=limit_tokens,
        hoped=gain(lengths_N.max(keepdims=True), cut_N.max(keepdims=True)),
        padded=gain(padded(lengths_N), padded(cut_N)),
        packed=gain(lengths_N, cut_N),
        tokens_lost=int((lengths_N - cut_N).sum()),
    )
