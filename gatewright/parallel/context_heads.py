"""Attention over ranks by an exchange of heads (Ulysses): whole documents on every rank, for a part of the heads.

Shapes: T own tokens, A tokens of all ranks of the group, G ranks of the group, N query heads, K key/value heads, D head
size.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatewright.model.attention_slices import SliceAttention, bounds_of
from gatewright.packing.exchange_heads import HeadExchange
from gatewright.parallel.collectives import all_to_all


class HeadsDealt:
    """Attention over the slices of one micro-batch."""

    def __init__(self, exchange: HeadExchange, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.group, self.size = group, exchange.size
        self.bounds = bounds_of(exchange.lengths, exchange.lengths, device)
        self.counts_G, self.own_G = exchange.counts, (exchange.counts[exchange.rank],) * exchange.size
        self.order_A = torch.from_numpy(exchange.order).to(device)
        self.back_A = self.order_A.argsort()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: SliceAttention) -> Tensor:
        """Output [1, T, N, D'] for q [1, N, T, D], k [1, K, T, D], v [1, K, T, D'] of the own tokens.

        Raises ValueError where the ranks do not divide the query heads. Key/value heads that they do not divide are
        repeated, each as often as makes them divisible.
        """
        if q.shape[1] % self.size:
            raise ValueError(f"{q.shape[1]} query heads cannot be dealt to {self.size} ranks")
        repeats = math.lcm(k.shape[1], self.size) // k.shape[1]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        parts = [self._by_rank(x) for x in (q, k, v)]
        received = _AllToAll.apply(torch.cat(parts, dim=-1).flatten(0, 1), self.own_G, self.counts_G, self.group)
        widths = [part.shape[-1] for part in parts]
        q, k, v = (
            x.unflatten(1, (-1, width)).transpose(0, 1)[None]
            for x, width in zip(received[self.order_A].split(widths, dim=1), (q.shape[-1], k.shape[-1], v.shape[-1]),
                                strict=True)
        )  # fmt: skip
        out_And = attend(q, k, v, self.bounds)[0]
        returned = _AllToAll.apply(out_And[self.back_A].flatten(1), self.counts_G, self.own_G, self.group)
        # [G · T, N/G · D'] → [T, N, D']: rank g had heads [g · N/G, (g + 1) · N/G).
        heads_GTF = returned.unflatten(0, (self.size, -1))
        return heads_GTF.transpose(0, 1).reshape(1, -1, self.size * q.shape[1], v.shape[-1])

    def _by_rank(self, x: Tensor) -> Tensor:
        """[G, T, heads / G · width]: what each rank gets of [1, heads, T, width]."""
        return x[0].unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2)


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group; gradients the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.counts, ctx.group = (send_counts, receive_counts), group
        return _all_to_all(rows, send_counts, receive_counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        send_counts, receive_counts = ctx.counts
        return _all_to_all(grad, receive_counts, send_counts, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(receive_counts), rows.shape[1])
    all_to_all(received, rows.contiguous(), receive_counts, send_counts, group=group)
    return received
