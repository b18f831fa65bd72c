"""The attention seam: causal attention that stops at document boundaries, registered in transformers as `gatewright`.

A micro-batch is one row of T tokens that holds several documents. The boundaries travel down the model as
`cu_seq_lens_q` (int32 [documents + 1]), the keyword transformers itself hands to varlen kernels; no mask exists.

Shapes: T tokens, S documents, N query heads, K key/value heads, D head size.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from gatewright.model.attention_slices import AttendSlices, Bounds, SliceAttention, attend_each_slice
from gatewright.model.sparse_attention import attend_masked, attend_to_chosen, band
from gatewright.spec.errors import ModelError

NAME = "gatewright"

Attend = Callable[..., Tensor]
"""(q_1NTD, k_1KTD, v_1KTD, cu_seqlens, longest, scale, window) -> [1, T, N, D]"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The attention kernel in force, and why that one."""

    name: str
    reason: str
    attend: Attend
    equal_widths: bool = False
    """Whether it takes values only as wide as keys."""
    attend_slices: AttendSlices = attend_each_slice
    """The same from slices of documents that several ranks hold."""


def choose_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest kernel that honours document boundaries on `device` for `dtype`; the only place that chooses."""
    if device.type != "cuda":
        return Kernel("sdpa per document", f"{device.type} has no varlen kernel", attend_each_document)
    if dtype not in (torch.bfloat16, torch.float16):
        return Kernel("sdpa per document", f"varlen kernels take no {dtype}", attend_each_document)
    try:
        flash = importlib.import_module("flash_attn")
    except ImportError as absent:
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch_varlen(f"flash-attn: {absent}")
        return Kernel(
            "sdpa per document", f"flash-attn: {absent}; device too old for varlen_attn", attend_each_document
        )
    return through_flash(flash.flash_attn_varlen_func, name=f"flash-attn {flash.__version__} varlen")


def install(kernel: Kernel) -> None:
    """Registers `kernel` as transformers' attention implementation `gatewright`.

    transformers builds no attention mask for a name it has no mask function for, which is what packing needs.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        indices: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        document_lengths: Sequence[int] | None = None,
        context: Callable[..., Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if cu_seq_lens_q is None or max_length_q is None:
            raise ModelError(
                f"{type(module).__name__} lost the document boundaries on the way to attention: this architecture "
                "cannot train on packed documents"
            )
        if dropout:
            raise ModelError(f"{type(module).__name__} asks for attention dropout, which is not supported")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        cu_seqlens, longest = cu_seq_lens_q, max_length_q
        lengths = cu_seqlens.diff().tolist() if document_lengths is None else document_lengths
        if context is not None:
            odd = (softcap, s_aux, indices, attention_mask, _chunk_tokens(module))
            if any(thing is not None for thing in odd):
                raise ModelError(
                    f"{type(module).__name__} has soft caps, sinks, masks or chunks, which are not proved with "
                    "documents cut over ranks; set parallel.cp: 1"
                )
            attend = SliceAttention(scale, sliding_window, kernel.attend_slices, kernel.equal_widths)
            return context(query, key, value, attend).contiguous(), None
        if indices is not None:
            if softcap is not None or sliding_window is not None:
                raise ModelError(f"{type(module).__name__} bounds the scores of chosen keys, which is not supported")
            if indices.shape[-1] < longest:
                return attend_to_chosen(query, key, value, lengths, scale, indices, s_aux), None
        elif attention_mask is not None:
            if len(cu_seqlens) != 2 or softcap is not None:
                raise ModelError(f"{type(module).__name__} asks for an attention mask, which is not supported")
            return attend_masked(query, key, value, attention_mask, scale, s_aux), None
        chunk = _chunk_tokens(module)
        if chunk is not None and chunk < longest:
            cu_seqlens, longest = cu_seqlens.new_tensor(chunk_boundaries(lengths, chunk)), chunk
        if softcap is not None or s_aux is not None:
            out = attend_plain(query, key, value, cu_seqlens, scale, sliding_window, softcap, s_aux)
        else:
            # In multi-head latent attention values are narrower than keys, which varlen kernels refuse: zeros fill up.
            width = value.shape[-1]
            value = F.pad(value, (0, query.shape[-1] - width)) if kernel.equal_widths else value
            out = kernel.attend(query, key, value, cu_seqlens, longest, scale, sliding_window)[..., :width]
        return out.contiguous(), None  # as transformers' own: some modules take a view of it

    AttentionInterface.register(NAME, forward)


def _chunk_tokens(module: nn.Module) -> int | None:
    """Tokens of a chunk in a layer whose attention never leaves its chunk (Llama 4); None elsewhere."""
    tokens = getattr(module.config, "attention_chunk_size", None)
    return tokens if tokens and module.config.layer_types[module.layer_idx] == "chunked_attention" else None


def chunk_boundaries(lengths: Sequence[int], chunk: int) -> list[int]:
    """The boundaries of documents and of their chunks, counted from the beginning of each document."""
    ends = [0, *accumulate(lengths)]
    return [place for a, b in pairwise(ends) for place in range(a, b, chunk)] + [ends[-1]]


def attend_each_document(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention by one SDPA call a document; runs on any device. Returns [1, T, N, D]."""
    lengths = tuple(cu_seqlens.diff().tolist())
    return attend_each_slice(q, k, v, Bounds(lengths, lengths, cu_seqlens, cu_seqlens), scale, window)


Ends = tuple[Tensor, Tensor, int, int]
"""cu_seqlens of queries and of keys, and the most of each in one document or slice: as varlen kernels take them."""


def torch_varlen(reason: str) -> Kernel:
    """Torch's own varlen kernel (CUDA and ROCm builds that have one)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Ends, scale: float, window: int | None) -> Tensor:
        return varlen_attn(
            q, k, v, *ends,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip

    return _varlen_kernel("torch varlen_attn", reason, attend)


def through_flash(varlen: Callable[..., Tensor], *, name: str, reason: str = "installed") -> Kernel:
    """A function with flash-attn's `flash_attn_varlen_func` signature, 2.1 or later."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Ends, scale: float, window: int | None) -> Tensor:
        band = (-1, -1) if window is None else (window - 1, 0)
        return varlen(q, k, v, *ends, softmax_scale=scale, causal=True, window_size=band, deterministic=True)

    return _varlen_kernel(name, reason, attend)


def _varlen_kernel(name: str, reason: str, varlen: Callable[..., Tensor]) -> Kernel:
    """`varlen`: (q_TND, k_CKD, v_CKD, ends, scale, window) -> [T, N, D].

    With fewer queries than keys the last query sees the last key, in flash-attn and in torch: what slices want.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int | None
    ) -> Tensor:
        tokens_first = (x[0].transpose(0, 1) for x in (q, k, v))
        return varlen(*tokens_first, (cu_seqlens, cu_seqlens, longest, longest), scale, window)[None]

    def attend_slices(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
        tokens_first = (x[0].transpose(0, 1) for x in (q, k, v))
        ends = (bounds.cu_queries, bounds.cu_keys, max(bounds.query_lengths), max(bounds.key_lengths))
        return varlen(*tokens_first, ends, scale, window)[None]

    return Kernel(name, reason, attend, equal_widths=True, attend_slices=attend_slices)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention written out: the kernels' reference, and the path for soft-capped scores and attention sinks.

    A sink is one more logit a head that takes probability and gives no value (gpt_oss). Returns [1, T, N, D].
    """
    lengths = cu_seqlens.diff().tolist()
    groups = q.shape[1] // k.shape[1]
    outputs = []
    for q_i, k_i, v_i in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True):
        length = q_i.shape[2]
        k_i, v_i = k_i.repeat_interleave(groups, dim=1), v_i.repeat_interleave(groups, dim=1)
        scores = q_i @ k_i.transpose(-2, -1) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        allowed = band(length, length if window is None else window, q.device)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~allowed, float("-inf"))
        if sinks_N is not None:
            sink = sinks_N.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length].to(v.dtype)
        outputs.append(weights @ v_i)
    return torch.cat(outputs, dim=2).transpose(1, 2)
