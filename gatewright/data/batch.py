"""Batch: one micro-batch as tensors on a single token axis, without padding and without a batch dimension.

documents    [a b c] [d e]            labels: the next token of the same document if the model learns to write it
tokens       a  b  c  d  e            positions    0 1 2 0 1
labels       b  c  .  e  .            cu_seqlens   0 3 5        (. is -100)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gatewright.data.view import DocumentView
from gatewright.packing.exchange_plan import Plan
from gatewright.packing.schedule import Slice

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T tokens of S documents. No label crosses a boundary: the first token of a document is nobody's target."""

    tokens_T: Tensor
    """[T] int64."""
    labels_T: Tensor
    """[T] int64; -100 where nothing is to be predicted, as at the last position of every document."""
    positions_T: Tensor
    """[T] int64, restarted at 0 in every document."""
    cu_seqlens_S1: Tensor
    """[S + 1] int32: where each document begins, and T."""
    lengths: tuple[int, ...]
    documents: tuple[int, ...]
    """Numbers of the documents in their view; none in a filler."""
    exchange: Plan | None = None
    """Where documents are cut: the keys and values that ranks exchange. Lengths are then those of the slices."""
    exchange_name: str | None = None
    """What ranks make in this micro-batch, this one or others, such as `heads over 2`; None without CP."""
    context: Callable[..., Tensor] | None = None
    """Attention that makes this exchange; put there when the batch is placed on its device."""

    @property
    def counts(self) -> bool:
        """False for a filler."""
        return bool(self.documents)

    @property
    def tokens(self) -> int:
        """0 in a filler."""
        return sum(self.lengths) if self.counts else 0

    @property
    def slices(self) -> list[tuple[int, int]]:
        """Each piece's place in its document, from its first token to the one behind its last; none in a filler."""
        firsts = self.positions_T[self.cu_seqlens_S1[:-1].long()].tolist() if self.counts else []
        return [(first, first + length) for first, length in zip(firsts, self.lengths, strict=self.counts)]

    @property
    def target_tokens(self) -> int:
        """Tokens that carry loss."""
        return int((self.labels_T != IGNORED).sum())

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on `device`."""
        return replace(
            self,
            tokens_T=self.tokens_T.to(device, non_blocking=True),
            labels_T=self.labels_T.to(device, non_blocking=True),
            positions_T=self.positions_T.to(device, non_blocking=True),
            cu_seqlens_S1=self.cu_seqlens_S1.to(device, non_blocking=True),
        )


def make_batch(view: DocumentView, documents: Sequence[int]) -> Batch:
    """The micro-batch that holds these documents, in this order."""
    tokens, labels, lengths = [], [], []
    for number in documents:
        token_L, is_target_L = view.document(number)
        label_L = np.full(len(token_L), IGNORED, np.int64)
        label_L[:-1] = np.where(is_target_L[1:], token_L[1:], IGNORED)
        tokens.append(token_L)
        labels.append(label_L)
        lengths.append(len(token_L))
    return Batch(
        tokens_T=torch.from_numpy(np.concatenate(tokens)),
        labels_T=torch.from_numpy(np.concatenate(labels)),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_S1=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=tuple(lengths),
        documents=tuple(int(number) for number in documents),
    )


def make_slices(view: DocumentView, slices: Sequence[Slice], exchange: Plan | None) -> Batch:
    """The micro-batch that holds these parts of documents; a part's last label is the token that follows in another."""
    tokens, labels, positions = [], [], []
    for number, start, end in slices:
        token_L, is_target_L = view.document(number)
        label_L = np.full(len(token_L), IGNORED, np.int64)
        label_L[:-1] = np.where(is_target_L[1:], token_L[1:], IGNORED)
        tokens.append(token_L[start:end])
        labels.append(label_L[start:end])
        positions.append(torch.arange(start, end))
    lengths = [piece.end - piece.start for piece in slices]
    return Batch(
        tokens_T=torch.from_numpy(np.concatenate(tokens)),
        labels_T=torch.from_numpy(np.concatenate(labels)),
        positions_T=torch.cat(positions),
        cu_seqlens_S1=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=tuple(lengths),
        documents=tuple(piece.document for piece in slices),
        exchange=exchange,
    )


def filler(exchange: Plan | None = None) -> Batch:
    """The micro-batch of a rank that has none left, while others still work: one token, which counts for nothing.

    `exchange`: its part in what the others exchange, which every rank must come to.
    """
    return Batch(
        tokens_T=torch.zeros(1, dtype=torch.int64),
        labels_T=torch.full((1,), IGNORED),
        positions_T=torch.zeros(1, dtype=torch.int64),
        cu_seqlens_S1=torch.tensor([0, 1], dtype=torch.int32),
        lengths=(1,),
        documents=(),
        exchange=exchange,
    )
