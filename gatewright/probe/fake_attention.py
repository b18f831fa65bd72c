"""Flash attention's memory without its arithmetic: the tensors it keeps for backward, and its workspaces.

Shapes: T tokens, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gatewright.model.attention import Kernel, through_flash
from gatewright.spec.errors import ModelError

Stand = Literal["flash", "torch_varlen"]


def stand_in(kernel: Stand, *, multiprocessors: int = 132) -> Kernel:
    """The attention kernel of a GPU as choose_kernel would pick it there, for fake tensors.

    `multiprocessors` of the GPU decides the size of flash-attn's deterministic workspace (132: H100, H200).
    """
    if kernel == "flash":
        return through_flash(_flash_varlen(multiprocessors), name="flash-attn varlen", reason="stand-in")
    return Kernel("torch varlen_attn", "stand-in", _attend_torch_varlen, equal_widths=True)


def _flash_varlen(multiprocessors: int) -> Callable[..., Tensor]:
    def varlen(
        q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, *_: Any, deterministic: bool, **__: Any
    ) -> Tensor:
        documents = len(cu_seqlens) - 1
        splits = -(-multiprocessors // (documents * q_TND.shape[1])) if deterministic else 1
        return FlashMemory.apply(q_TND, k_TKD, v_TKD, documents, splits)

    return varlen


def _attend_torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """As model.attention.torch_varlen, which runs flash-attn's kernels without their deterministic mode."""
    q_TND, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q, k, v))
    return FlashMemory.apply(q_TND, k_TKD, v_TKD, len(cu_seqlens) - 1, 1)[None]


class FlashMemory(torch.autograd.Function):
    """out [T, N, Dv] of q [T, N, D], k [T, K, D] and v [T, K, Dv], without values.

    Allocates what flash-attn 2 does (csrc/flash_attn/flash_api.cpp: mha_varlen_fwd, mha_varlen_bwd).
    """

    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: int, splits: int) -> Tensor:
        tokens, heads, _ = q_TND.shape
        if heads % k_TKD.shape[1]:
            raise ModelError(f"{heads} query heads cannot share {k_TKD.shape[1]} key heads evenly: change config.json")
        out_TND = q_TND.new_empty(tokens, heads, v_TKD.shape[2])
        lse_NT = q_TND.new_empty(heads, tokens, dtype=torch.float32)
        ctx.documents, ctx.splits = documents, splits
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, lse_NT)
        return out_TND

    @staticmethod
    def backward(ctx: Any, grad_out_TND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_TND, k_TKD, v_TKD, _, _ = ctx.saved_tensors
        tokens, heads, width = q_TND.shape
        grads = tuple(torch.empty_like(x) for x in (q_TND, k_TKD, v_TKD))
        padded = tokens + 128 * ctx.documents
        step = 32 if width <= 128 else 64
        workspaces = [
            q_TND.new_empty(heads, padded, dtype=torch.float32),  # rows' dot(dO, O)
            q_TND.new_empty(ctx.splits, padded, heads, -(-width // step) * step, dtype=torch.float32),  # dq summed up
        ]
        if k_TKD.shape[1] != heads:
            # dk and dv of every query head, before each group is summed
            workspaces += [x.new_empty(tokens, heads, x.shape[2]) for x in (k_TKD, v_TKD)]
        return *grads, None, None
