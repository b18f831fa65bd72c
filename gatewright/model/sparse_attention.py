"""Attention to chosen keys: DeepSeek's indexer document by document, and the mask that compressed keys are added to.

Shapes: T tokens, L tokens of one document, k keys an indexer chooses for a query, N query heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gatewright.model.document_lengths import lengths_of, spans, within


def attend_without_mask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A sparse attention module's own forward on the whole row: it slices a mask, and no packed row has one.

    It hands its indexer no keywords either, so that must ask for the boundaries.
    """
    lengths = lengths_of(kwargs)
    if lengths is not None:
        kwargs["attention_mask"] = next(self.parameters()).new_empty(1, 1, 1, 1)
    with within(lengths):
        return type(self).forward(self, *args, **kwargs)


def choose_keys(
    self: nn.Module,
    hidden_1TH: Tensor,
    q_residual: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """int32 [1, T, k]: for each token the places, counted from the beginning of its document, of the keys it may see.

    A document no longer than the indexer's top-k sees all of itself: there is nothing to choose.
    """
    forward, lengths = type(self).forward, lengths_of({})
    if lengths is None:
        return forward(self, hidden_1TH, q_residual, position_embeddings, mask, position_ids, cache)
    width = min(self.index_topk, max(lengths))
    chosen = []
    for start, end in spans(lengths):
        length = end - start
        if length <= self.index_topk:
            keys_Lk = torch.arange(length, device=hidden_1TH.device, dtype=torch.int32).expand(length, -1)
        else:
            cut = [x[:, start:end] for x in (hidden_1TH, q_residual, *position_embeddings)]
            causal_1LL = band(length, length, hidden_1TH.device)[None]
            [keys_Lk] = forward(self, cut[0], cut[1], (cut[2], cut[3]), causal_1LL, None)
        # A short document has fewer keys than columns: naming the first of them again changes nothing.
        chosen.append(torch.cat([keys_Lk, keys_Lk[:, :1].expand(-1, width - keys_Lk.shape[1])], dim=1))
    return torch.cat(chosen)[None]


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    keys_1Tk: Tensor,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention of each document to the keys chosen for each query. Returns [1, T, N, D]."""
    lengths, outputs = list(lengths), []
    documents = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), keys_1Tk[0].split(lengths), strict=True)
    for q_i, k_i, v_i, keys_Lk in documents:
        length = q_i.shape[2]
        seen_LL = torch.zeros(length, length, dtype=torch.bool, device=q.device).scatter_(1, keys_Lk.long(), True)
        seen_LL &= band(length, length, q.device)
        if sinks_N is None:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q_i, k_i, v_i, seen_LL, scale=scale, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2))
        else:
            mask_11LL = torch.zeros_like(seen_LL, dtype=torch.float32).masked_fill(~seen_LL, float("-inf"))
            outputs.append(attend_masked(q_i, k_i, v_i, mask_11LL[None, None], scale, sinks_N))
    return torch.cat(outputs, dim=1)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask_11LK: Tensor, scale: float, sinks_N: Tensor | None) -> Tensor:
    """Attention of one document under an additive mask over K keys, compressed ones too. Returns [1, L, N, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-2, -1) * scale + mask_11LK
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2)


def additive_band(module: nn.Module, length: int) -> Tensor:
    """[1, 1, L, L] in the type of the module's weights: 0 where a token may look, -inf elsewhere."""
    weight = next(p for p in module.parameters() if p.is_floating_point())
    seen_LL = band(length, module.sliding_window or length, weight.device)
    return torch.zeros(1, 1, length, length, device=weight.device).masked_fill(~seen_LL, float("-inf"))


def band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool: query t may look at keys t - window + 1 … t."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)
