"""Causal attention from slices of documents: queries are the last tokens of the keys they look at.

Shapes: T tokens of all slices, C keys of all slices, N query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class SliceAttention:
    """A layer's attention from slices: what an exchange of keys and values is given to attend with."""

    scale: float
    window: int | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, query_lengths: Sequence[int], key_lengths: Sequence[int]
    ) -> Tensor:
        """Output [1, T, N, D'] of q [1, N, T, D] to k [1, K, C, D] and v [1, K, C, D']."""
        return attend_slices(q, k, v, query_lengths, key_lengths, scale=self.scale, window=self.window)


def attend_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Output [1, T, N, D'] by one SDPA call a slice; query i of a slice of L with C keys sees keys 0 … C - L + i."""
    if not query_lengths:  # nothing to attend from, but the gradients of what is held travel to and fro all the same
        return v.new_zeros(1, 0, q.shape[1], v.shape[-1]) + (q.sum() + k.sum() + v.sum()) * 0
    outputs = []
    slices = zip(
        q.split(list(query_lengths), dim=2),
        k.split(list(key_lengths), dim=2),
        v.split(list(key_lengths), dim=2),
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
