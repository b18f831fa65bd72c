"""Causal attention from slices of documents: queries are the last tokens of the keys they look at.

Shapes: T tokens of all slices, C keys of all slices, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where slices begin and end; made once for a micro-batch, for all of its layers."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cu_queries: Tensor
    """int32 [slices + 1] where the queries of each begin, as varlen kernels want it."""
    cu_keys: Tensor


AttendSlices = Callable[[Tensor, Tensor, Tensor, Bounds, float, int | None], Tensor]
"""(q_1NTD, k_1KCD, v_1KCD, bounds, scale, window) -> [1, T, N, D]; query i of L to C keys sees keys 0 … C - L + i."""


def bounds_of(query_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device) -> Bounds:
    cu_queries, cu_keys = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (query_lengths, key_lengths)
    )
    return Bounds(tuple(query_lengths), tuple(key_lengths), cu_queries, cu_keys)


@dataclass(frozen=True, slots=True)
class SliceAttention:
    """A layer's attention from slices: what an exchange of keys and values is given to attend with."""

    scale: float
    window: int | None
    attend: AttendSlices
    equal_widths: bool
    """Whether `attend` takes values only as wide as keys."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> Tensor:
        """Output [1, T, N, D'] of q [1, N, T, D] to k [1, K, C, D] and v [1, K, C, D']."""
        width = v.shape[-1]
        if not bounds.query_lengths:
            # Nothing to attend from, but the gradients of what is held travel to and fro all the same.
            return v.new_zeros(1, 0, q.shape[1], width) + (q.sum() + k.sum() + v.sum()) * 0
        v = F.pad(v, (0, q.shape[-1] - width)) if self.equal_widths else v
        return self.attend(q, k, v, bounds, self.scale, self.window)[..., :width]


def attend_each_slice(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
    """By one SDPA call a slice; runs on any device."""
    outputs = []
    slices = zip(
        q.split(bounds.query_lengths, dim=2),
        k.split(bounds.key_lengths, dim=2),
        v.split(bounds.key_lengths, dim=2),
        strict=True,
    )
    for q_i, k_i, v_i in slices:
        queries, keys = q_i.shape[2], k_i.shape[2]
        whole = queries == keys and (window is None or keys <= window)
        out = F.scaled_dot_product_attention(
            q_i,
            k_i,
            v_i,
            attn_mask=None if whole else seen(queries, keys, window, q.device),
            is_causal=whole,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: the keys up to the query itself, the last `window` of them."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    return key <= query if window is None else (key <= query) & (key > query - window)
