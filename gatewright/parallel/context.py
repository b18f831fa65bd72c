"""Context parallelism: a rank attends from the slices of documents it holds, to keys and values of other ranks as well.

`Moved` is the exchange for any slices: one uneven all-to-all brings each rank the rows that the causal mask lets it
look at, and no others (packing/exchange.py says which). Its groups are whatever the schedule of the micro-batch says;
the process group is always the same.

`Gathered` is for groups of neighbours: every rank gets all rows of the documents that its group cuts. `HeadsDealt`
(context_heads.py) and `Ring` (context_ring.py) are for such groups too.

Shapes: T own tokens, R tokens received, C keys looked at, N query heads, K key/value heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gatewright.model.attention_slices import SliceAttention, bounds_of
from gatewright.packing.exchange import Exchange
from gatewright.packing.exchange_gather import Gather
from gatewright.parallel.collectives import all_gather, all_to_all, reduce_scatter


class Context(Protocol):
    """Attention of a layer over the slices of one micro-batch, with its exchange."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: SliceAttention) -> Tensor:
        """Output [1, T, N, D'] for q [1, N, T, D], k [1, K, T, D], v [1, K, T, D'] of the own tokens."""


@dataclass(frozen=True, slots=True)
class Rows:
    """An exchange of rows on a device."""

    send_rows: tuple[Tensor, ...]
    """[ranks] Own rows to each rank."""
    receive_counts: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def send_counts(self) -> list[int]:
        return [len(rows) for rows in self.send_rows]


class Moved:
    """Attention over the slices of one micro-batch."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup, *, device: torch.device) -> None:
        rows = tuple(torch.from_numpy(part).to(device) for part in exchange.send_rows)
        self.rows = Rows(rows, exchange.receive_counts, group)
        self.key_rows_C = torch.from_numpy(exchange.key_rows).to(device)
        self.bounds = bounds_of(exchange.query_lengths, exchange.key_lengths, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: SliceAttention) -> Tensor:
        """Output [1, T, N, D'] for q [1, N, T, D], k [1, K, T, D], v [1, K, T, D'] of the own tokens."""
        own = rows_of(k, v)
        others = _Move.apply(own, self.rows)
        keys, values = looked_at(own, others, self.key_rows_C, k, v)
        return attend(q, keys, values, self.bounds)


class Gathered:
    """Attention over the slices of one micro-batch, of ranks that share documents with their aligned group only."""

    def __init__(self, exchange: Gather, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.exchange, self.group = exchange, group
        self.share_rows_S = torch.from_numpy(exchange.share_rows).to(device)
        self.key_rows_C = torch.from_numpy(exchange.key_rows).to(device)
        self.bounds = bounds_of(exchange.query_lengths, exchange.key_lengths, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: SliceAttention) -> Tensor:
        """Output [1, T, N, D'] for q [1, N, T, D], k [1, K, T, D], v [1, K, T, D'] of the own tokens."""
        own = rows_of(k, v)
        shared = F.pad(own[self.share_rows_S], (0, 0, 0, self.exchange.most - len(self.share_rows_S)))
        others = _Gather.apply(shared, self.exchange.size, self.group)
        keys, values = looked_at(own, others, self.key_rows_C, k, v)
        return attend(q, keys, values, self.bounds)


def rows_of(k: Tensor, v: Tensor) -> Tensor:
    """[T, K · (D + D')]: keys and values as rows of tokens."""
    return torch.cat([k, v], dim=-1)[0].transpose(0, 1).flatten(1)


def looked_at(own: Tensor, others: Tensor, key_rows_C: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [1, K, C, D] and values [1, K, C, D'] of these rows of own ones and others."""
    heads, widths = k.shape[1], (k.shape[-1], v.shape[-1])
    # An index, not index_select: its gradient adds up in a fixed order on every device.
    rows = torch.cat([own, others])[key_rows_C].unflatten(1, (heads, sum(widths))).transpose(0, 1)[None]
    keys, values = rows.split(widths, dim=-1)
    return keys, values


class _Move(torch.autograd.Function):
    """Rows to the ranks that need them; gradients back to where the rows came from, where they are added up."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, own.shape
        received = own.new_empty(sum(rows.receive_counts), own.shape[1])
        all_to_all(received, own[torch.cat(rows.send_rows)], rows.receive_counts, rows.send_counts, group=rows.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows: Rows = ctx.rows
        returned = grad.new_empty(sum(rows.send_counts), grad.shape[1])
        all_to_all(returned, grad.contiguous(), rows.send_counts, rows.receive_counts, group=rows.group)
        total = grad.new_zeros(ctx.shape)
        # Rank by rank: within one a row occurs once, so the sum has a fixed order.
        for part, index in zip(returned.split(rows.send_counts), rows.send_rows, strict=True):
            total[index] += part
        return total, None


class _Gather(torch.autograd.Function):
    """Equally many rows of each rank to all ranks of a group; gradients added up on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, rows.shape
        gathered = rows.new_empty(size * rows.shape[0], rows.shape[1])
        if len(rows):
            all_gather(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        total = grad.new_empty(ctx.shape)
        if len(total):
            reduce_scatter(total, grad.contiguous(), group=ctx.group)
        return total, None, None
