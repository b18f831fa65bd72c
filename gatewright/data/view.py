"""Documents as the trainer sees them: rows of a store under a limit of length, by one of the over-long policies."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gatewright.packing.arrays import IntArray

Policy = Literal["truncate", "split", "drop"]
MIN_TOKENS = 2
"""A shorter document has no token that anything before it could predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """N documents of at most `max_tokens` tokens, each with at least one token to learn; read from disk when asked."""

    lengths: IntArray
    """[N] tokens of each document."""
    starts_N: IntArray
    """[N] where each begins in the store's tokens."""
    rows_N: IntArray
    """[N] row of the store that it is, or is a piece of."""
    max_tokens: int
    overlong_documents: int
    """Rows that were longer than that."""
    tokens_lost: int
    """Tokens cut off or dropped with these; where they were split, the targets at the cuts, which nothing predicts."""
    untrained_documents: int
    """Rows left out because they hold nothing to learn, or nothing after they were truncated."""
    target_tokens: int
    """Tokens that carry loss."""
    tokens_T: npt.NDArray[np.unsignedinteger[Any]] = field(repr=False)
    is_target_T: npt.NDArray[np.bool_] = field(repr=False)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Its tokens, and which of them are to be learnt. The first one is never predicted, whatever it says there."""
        start = int(self.starts_N[number])
        end = start + int(self.lengths[number])
        return self.tokens_T[start:end].astype(np.int64), self.is_target_T[start:end]


def limit_rows(
    *,
    rows_N: IntArray,
    starts_N: IntArray,
    lengths_N: IntArray,
    target_counts_N: IntArray,
    tokens_T: npt.NDArray[np.unsignedinteger[Any]],
    is_target_T: npt.NDArray[np.bool_],
    max_tokens: int,
    policy: Policy,
    untrained: int,
) -> DocumentView:
    """The view of these rows in which none is longer than `max_tokens`.

    untrained: rows that were left out before, for the count.
    """
    over_N = lengths_N > max_tokens
    owner, within, length = _cut(lengths_N, max_tokens, policy)
    start, count = starts_N[owner] + within, target_counts_N[owner]
    for piece in np.flatnonzero(length != lengths_N[owner]):
        count[piece] = is_target_T[start[piece] + 1 : start[piece] + length[piece]].sum()
    keep = (count > 0) & (length >= MIN_TOKENS)
    if policy == "split":
        lost = int(is_target_T[start[within > 0]].sum())
    else:
        lost = int(lengths_N[over_N].sum() - length[keep & over_N[owner]].sum())
    kept_rows = len(np.unique(owner[keep]))
    dropped_rows = int(over_N.sum()) if policy == "drop" else 0
    return DocumentView(
        lengths=length[keep],
        starts_N=start[keep],
        rows_N=rows_N[owner[keep]],
        max_tokens=max_tokens,
        overlong_documents=int(over_N.sum()),
        tokens_lost=lost,
        untrained_documents=untrained + len(rows_N) - kept_rows - dropped_rows,
        target_tokens=int(count[keep].sum()),
        tokens_T=tokens_T,
        is_target_T=is_target_T,
    )


def _cut(lengths_N: IntArray, max_tokens: int, policy: Policy) -> tuple[IntArray, IntArray, IntArray]:
    """Pieces of the rows: each one's row, where in the row it begins, and its length."""
    if policy == "drop":
        owner = np.flatnonzero(lengths_N <= max_tokens)
        return owner, np.zeros_like(owner), lengths_N[owner]
    if policy == "truncate":
        return np.arange(len(lengths_N)), np.zeros_like(lengths_N), np.minimum(lengths_N, max_tokens)
    pieces_N = -(-lengths_N // max_tokens)
    owner = np.repeat(np.arange(len(lengths_N)), pieces_N)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
    within = nth * max_tokens
    return owner, within, np.minimum(lengths_N[owner] - within, max_tokens)
