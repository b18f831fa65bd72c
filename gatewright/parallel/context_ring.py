"""Attention over ranks by a ring: blocks of keys and values go round, and each rank merges what it sees of them.

Partial outputs are merged by their log-sum-exp, so that a rank holds its own rows, the block at hand and the one on its
way, never all that it looks at. The backward pass sends the blocks round again, and their gradients with them, home.

The softmax merge is that of Milakov and Gimelshein, Online normalizer calculation for softmax (2018).

Shapes: T own tokens, B rows of a block, a queries of a pair, N query heads, K key/value heads, D head size,
F = K · (D + D').
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gatewright.model.attention_blocks import BlockAttention
from gatewright.model.attention_slices import SliceAttention
from gatewright.packing.exchange_ring import Pair, RingExchange
from gatewright.parallel.collectives import wait
from gatewright.parallel.context import rows_of


@dataclass(frozen=True, slots=True)
class Round:
    """A ring exchange on a device, and the attention that is computed on the way."""

    exchange: RingExchange
    travel_rows_B: Tensor
    group: dist.ProcessGroup
    attend: SliceAttention
    key_heads: int
    key_width: int

    def block(self, step: int) -> int:
        """Rows of the block that is here at this step."""
        return self.exchange.counts[(self.exchange.rank - step) % self.exchange.size]

    def split(self, rows_BF: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [K, B, D] and values [K, B, D'] of rows."""
        heads_first = rows_BF.unflatten(1, (self.key_heads, -1)).transpose(0, 1)
        return heads_first[..., : self.key_width], heads_first[..., self.key_width :]

    def visible(self, step: int) -> list[Pair]:
        """Pairs of this step of which the window leaves something."""
        window = self.attend.window
        return [p for p in self.exchange.pairs[step] if window is None or p.ahead - p.keys + 1 < window]

    def of(self, pair: Pair) -> tuple[BlockAttention, slice, slice]:
        """A pair's attention, its rows of queries and its rows of the block."""
        attention = BlockAttention(self.attend.scale, self.attend.window, pair.ahead)
        return attention, slice(pair.query, pair.query + pair.queries), slice(pair.key, pair.key + pair.keys)


class Ring:
    """Attention over the slices of one micro-batch, of ranks that share documents with their aligned group only."""

    def __init__(self, exchange: RingExchange, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.exchange, self.group = exchange, group
        self.travel_rows_B = torch.from_numpy(exchange.travel_rows).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: SliceAttention) -> Tensor:
        """Output [1, T, N, D'] for q [1, N, T, D], k [1, K, T, D], v [1, K, T, D'] of the own tokens."""
        ring = Round(self.exchange, self.travel_rows_B, self.group, attend, k.shape[1], k.shape[-1])
        out_NTd: Tensor = _Ring.apply(q[0], rows_of(k, v), ring)
        return out_NTd.transpose(0, 1)[None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NTD: Tensor, own_TF: Tensor, ring: Round) -> Tensor:
        out_NTd = q_NTD.new_zeros(*q_NTD.shape[:2], own_TF.shape[1] // ring.key_heads - ring.key_width).float()
        lse_NT = q_NTD.new_full(q_NTD.shape[:2], float("-inf"), dtype=torch.float32)
        travelling_BF = own_TF[ring.travel_rows_B]
        for step in range(ring.exchange.size):
            passing = _pass_on(travelling_BF, ring, step) if step + 1 < ring.exchange.size else None
            keys, values = ring.split(travelling_BF if step else own_TF)
            for pair in ring.visible(step):
                attention, mine, theirs = ring.of(pair)
                _merge(out_NTd, lse_NT, mine, *attention(q_NTD[:, mine], keys[:, theirs], values[:, theirs]))
            if passing is not None:
                travelling_BF = passing.arrived()
        out = out_NTd.to(own_TF.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q_NTD, own_TF, out, lse_NT)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NTd: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        ring: Round = ctx.ring
        q_NTD, own_TF, out_NTd, lse_NT = ctx.saved_tensors
        dq_NTD = torch.zeros_like(q_NTD, dtype=torch.float32)
        home_TF = torch.zeros_like(own_TF, dtype=torch.float32)
        travelling_BF = own_TF[ring.travel_rows_B]
        gradient_BF = home_TF[:0]  # of the block at hand, by all who had it before
        for step in range(ring.exchange.size):
            last = step + 1 == ring.exchange.size
            passing = None if last else _pass_on(travelling_BF, ring, step)
            if step == 1:  # the owner keeps its own part at home
                gradient_BF = torch.zeros_like(travelling_BF, dtype=torch.float32)
            target = gradient_BF if step else home_TF
            keys, values = ring.split(travelling_BF if step else own_TF)
            to_keys, to_values = ring.split(target)
            for pair in ring.visible(step):
                attention, mine, theirs = ring.of(pair)
                grad, q, out, lse = (x[:, mine] for x in (grad_NTd, q_NTD, out_NTd, lse_NT))
                dq, dk, dv = attention.gradients(grad, q, keys[:, theirs], values[:, theirs], out, lse)
                dq_NTD[:, mine] += dq
                to_keys[:, theirs] += dk
                to_values[:, theirs] += dv
            if step:
                gradient_BF = _pass_on(gradient_BF, ring, step).arrived()
            if passing is not None:
                travelling_BF = passing.arrived()
        home_TF[ring.travel_rows_B] += gradient_BF
        return dq_NTD.to(q_NTD.dtype), home_TF.to(own_TF.dtype), None


@dataclass(frozen=True, slots=True)
class _Passing:
    sent: Tensor
    """Kept until it has left."""
    coming: Tensor
    works: list[dist.Work]

    def arrived(self) -> Tensor:
        wait(self.works, self.coming.device)
        return self.coming


def _pass_on(block_BF: Tensor, ring: Round, step: int) -> _Passing:
    """Sends the block at hand to the next rank, and takes that of the previous one; empty ones stay."""
    size, rank = ring.exchange.size, ring.exchange.rank
    coming = block_BF.new_empty(ring.block(step + 1), block_BF.shape[1])
    sent = block_BF.contiguous()
    operations = []
    if len(sent):
        operations.append(dist.P2POp(dist.isend, sent, group=ring.group, group_peer=(rank + 1) % size))
    if len(coming):
        operations.append(dist.P2POp(dist.irecv, coming, group=ring.group, group_peer=(rank - 1) % size))
    return _Passing(sent, coming, dist.batch_isend_irecv(operations) if operations else [])


def _merge(out_NTd: Tensor, lse_NT: Tensor, rows: slice, part_Nad: Tensor, part_lse_Na: Tensor) -> None:
    """Adds a partial output to what the queries of these rows have seen before; in place."""
    total_Na = torch.logaddexp(lse_NT[:, rows], part_lse_Na)
    kept, added = (torch.exp(lse - total_Na)[..., None] for lse in (lse_NT[:, rows], part_lse_Na))
    out_NTd[:, rows] = out_NTd[:, rows] * kept + part_Nad * added
    lse_NT[:, rows] = total_Na
