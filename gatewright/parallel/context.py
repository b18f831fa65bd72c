"""Context parallelism: a rank attends from the slices of documents it holds, to keys and values of other ranks as well.

`Moved` is the exchange for any slices: one uneven all-to-all brings each rank the rows that the causal mask lets it
look at, and no others (packing/exchange.py says which). Its groups are whatever the schedule of the micro-batch says;
the process group is always the same, so that no group is made while training.

`heads` (Ulysses) is for one group whose ranks share every document: queries, keys and values are exchanged so that each
rank has whole documents for some of the heads, and the output is exchanged back.

Shapes: T own tokens, R tokens received, C keys looked at, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatewright.packing.exchange import Exchange

AttendSlices = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]
"""(q [1, N, T, D], k [1, K, C, D], v [1, K, C, D'], query lengths, key lengths) -> [1, T, N, D']"""


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
        self.query_lengths, self.key_lengths = exchange.query_lengths, exchange.key_lengths

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: AttendSlices) -> Tensor:
        """Output [1, T, N, D'] for q [1, N, T, D], k [1, K, T, D], v [1, K, T, D'] of the own tokens."""
        heads, widths = k.shape[1], (k.shape[-1], v.shape[-1])
        own = torch.cat([k, v], dim=-1)[0].transpose(0, 1).flatten(1)
        others = _Move.apply(own, self.rows)
        # An index, not index_select: its gradient adds up in a fixed order on every device.
        looked_at = torch.cat([own, others])[self.key_rows_C].unflatten(1, (heads, sum(widths))).transpose(0, 1)[None]
        keys, values = looked_at.split(widths, dim=-1)
        return attend(q, keys, values, self.query_lengths, self.key_lengths)


class _Move(torch.autograd.Function):
    """Rows to the ranks that need them; gradients back to where the rows came from, where they are added up."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, own.shape
        received = own.new_empty(sum(rows.receive_counts), own.shape[1])
        dist.all_to_all_single(
            received, own[torch.cat(rows.send_rows)], list(rows.receive_counts), rows.send_counts, group=rows.group
        )
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows: Rows = ctx.rows
        returned = grad.new_empty(sum(rows.send_counts), grad.shape[1])
        dist.all_to_all_single(
            returned, grad.contiguous(), rows.send_counts, list(rows.receive_counts), group=rows.group
        )
        total = grad.new_zeros(ctx.shape)
        # Rank by rank: within one a row occurs once, so the sum has a fixed order.
        for part, index in zip(returned.split(rows.send_counts), rows.send_rows, strict=True):
            total[index] += part
        return total, None
