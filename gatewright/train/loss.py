"""Cross-entropy fused with the head: a chunk of tokens has logits at one time, never the whole micro-batch.

Forward and backward of a chunk happen together, in the forward pass: the chunk's logits become its loss and its
gradient at once, and only the gradient with respect to the hidden states (and the head, if it trains) is kept.

Shapes: T tokens of the micro-batch, C tokens of a chunk that carry loss, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from gatewright.model.head import Head, head_logits

IGNORED = -100


def token_loss_sum(hidden_TH: Tensor, head: Head, labels_T: Tensor, *, chunk_tokens: int) -> Tensor:
    """Sum over labelled tokens of -log p(label), float32 scalar, differentiable in hidden_TH and the head.

    Tokens with label -100 cost nothing: their logits are never computed.
    """
    part = head.low_rank(hidden_TH)
    low_Tr, b_Vr = (None, None) if part is None else (part.low_Tr, part.b_Vr)
    form = (labels_T, head.scale, head.softcap, chunk_tokens)
    return _ChunkedLoss.apply(hidden_TH, head.weight_VH, head.bias_V, low_Tr, b_Vr, *form)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        low_Tr: Tensor | None,
        b_Vr: Tensor | None,
        labels_T: Tensor,
        scale: float,
        softcap: float | None,
        chunk_tokens: int,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias, wants_low, wants_b = ctx.needs_input_grad[:5]
        labelled = (labels_T != IGNORED).nonzero().squeeze(1)
        total = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
        grad_hidden = torch.zeros_like(hidden_TH) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias and bias_V is not None else None
        grad_low = torch.zeros_like(low_Tr) if wants_low and low_Tr is not None else None
        grad_b = torch.zeros_like(b_Vr) if wants_b and b_Vr is not None else None

        for rows in labelled.split(chunk_tokens):
            hidden_CH, labels_C = hidden_TH[rows].to(weight_VH.dtype), labels_T[rows]
            low_Cr = None if low_Tr is None else low_Tr[rows]
            logits_CV = head_logits(hidden_CH, weight_VH, bias_V, low_Cr, b_Vr, scale=scale, softcap=softcap).float()
            lse_C = logits_CV.logsumexp(dim=1)
            total += (lse_C - logits_CV.gather(1, labels_C[:, None])[:, 0]).sum()
            if not any(ctx.needs_input_grad[:5]):
                continue
            # d loss / d logits = softmax - one-hot, then back through the soft cap and the scale, in place.
            slope = None if softcap is None else 1.0 - (logits_CV / softcap).square()
            grad_CV = logits_CV.sub_(lse_C[:, None]).exp_()
            grad_CV[torch.arange(len(rows), device=rows.device), labels_C] -= 1.0
            if slope is not None:
                grad_CV *= slope
            grad_CV = grad_CV if scale == 1.0 else grad_CV.mul_(scale)
            if grad_low is not None:
                grad_low[rows] = grad_CV @ b_Vr
            if grad_b is not None:
                grad_b += grad_CV.T @ low_Cr
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_CV @ weight_VH).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_CV.T @ hidden_CH
            if grad_bias is not None:
                grad_bias += grad_CV.sum(dim=0, dtype=torch.float32)

        ctx.dtypes = (weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, grad_low, grad_b)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_weight, grad_bias, grad_low, grad_b = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden * grad_total.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_total).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad_total).to(bias_dtype),
            None if grad_low is None else grad_low * grad_total,
            None if grad_b is None else grad_b * grad_total,
            None,
            None,
            None,
            None,
        )
