"""Attention to one block of keys and values, with the log-sum-exp of its scores, by which blocks are merged.

By torch's flash kernels where they take the inputs: then no scores are in memory. Else written out in float32, where a
block of a queries and b keys has its scores [N, a, b].

Shapes: a queries and b keys, N query heads, K key/value heads, g = N / K, D head size, D' that of values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

FLASH = torch.ops.aten
PROOF_ROWS = 72
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """What the queries of a slice see of a block of keys of their document."""

    scale: float
    window: int | None
    ahead: int
    """Place of the first query in the document less that of the first key; 0: the slice itself."""
    flash: bool = True
    """Whether a flash kernel may do it."""

    def __call__(self, q_NaD: Tensor, k_KbD: Tensor, v_KbD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [N, a, D'] and log-sum-exp [N, a], both float32; a query that sees nothing has 0 and -inf."""
        if self._fused(q_NaD, k_KbD):
            q, k, v = self._equal(q_NaD, k_KbD, v_KbD)
            forward = FLASH._scaled_dot_product_flash_attention_for_cpu
            if q.is_cuda:
                forward = FLASH._scaled_dot_product_flash_attention
            out, lse = forward(q, k, v, 0.0, self.ahead == 0, scale=self.scale)[:2]
            return out[0, ..., : v_KbD.shape[-1]].float(), lse[0].float()
        scores_Kgab = self._scores(q_NaD, k_KbD)
        lse_Kga = scores_Kgab.logsumexp(-1)
        weights = torch.exp(scores_Kgab - lse_Kga.masked_fill(lse_Kga == float("-inf"), 0.0)[..., None])
        out = weights.flatten(1, 2) @ v_KbD.float()
        return out.reshape(*q_NaD.shape[:2], -1), lse_Kga.flatten(0, 1)

    def gradients(
        self, grad_Nad: Tensor, q_NaD: Tensor, k_KbD: Tensor, v_KbD: Tensor, out_Nad: Tensor, lse_Na: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part in the gradients of q, k and v; output and log-sum-exp are those over all blocks.

        With weights P = exp(scores − lse): dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − dO·O), dQ = dS K · scale, dK = dSᵀ Q · scale:
        a block's kernel, given what all blocks make together, makes its part of the whole.
        """
        heads, width = k_KbD.shape[0], v_KbD.shape[-1]
        if self._fused(q_NaD, k_KbD):
            q, k, v = self._equal(q_NaD, k_KbD, v_KbD)
            wider = (0, q.shape[-1] - width)
            grad, out = (F.pad(x.to(q.dtype), wider)[None] for x in (grad_Nad, out_Nad))
            dq, dk, dv = _flash_gradients(grad, q, k, v, out, lse_Na[None], causal=self.ahead == 0, scale=self.scale)
            dk_KbD, dv_KbD = (x[0].unflatten(0, (heads, -1)).float().sum(1) for x in (dk, dv))
            return dq[0], dk_KbD, dv_KbD[..., :width]
        delta_Na = (grad_Nad.float() * out_Nad.float()).sum(-1)
        grad, queries, delta, lse = (
            x.float().unflatten(0, (heads, -1)).flatten(1, 2) for x in (grad_Nad, q_NaD, delta_Na, lse_Na)
        )
        weights = torch.exp(self._scores(q_NaD, k_KbD).flatten(1, 2) - lse[..., None])
        d_scores = weights * (grad @ v_KbD.float().transpose(1, 2) - delta[..., None]) * self.scale
        dq_NaD = (d_scores @ k_KbD.float()).reshape(q_NaD.shape)
        return dq_NaD, d_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ grad

    def _fused(self, q_NaD: Tensor, k_KbD: Tensor) -> bool:
        """Whether a flash kernel takes it: they have a causal square or no mask, and on a GPU half precision only."""
        queries, keys = q_NaD.shape[1], k_KbD.shape[1]
        square, before = self.ahead == 0 and queries == keys, self.ahead >= keys
        in_window = self.window is None or self.ahead + queries <= self.window
        kernel = q_NaD.device.type == "cpu" or (q_NaD.is_cuda and q_NaD.dtype in HALF and q_NaD.shape[-1] % 8 == 0)
        return self.flash and kernel and in_window and (square or before)

    def _equal(self, q_NaD: Tensor, k_KbD: Tensor, v_KbD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As flash kernels want them: a batch of one, as many key heads as query heads, values as wide as keys."""
        groups = q_NaD.shape[0] // k_KbD.shape[0]
        v_KbD = F.pad(v_KbD, (0, q_NaD.shape[-1] - v_KbD.shape[-1]))
        k, v = (x.repeat_interleave(groups, dim=0)[None] for x in (k_KbD, v_KbD))
        return q_NaD[None], k, v

    def _scores(self, q_NaD: Tensor, k_KbD: Tensor) -> Tensor:
        """[K, g, a, b] scaled and masked scores in float32."""
        queries, keys = q_NaD.shape[1], k_KbD.shape[1]
        grouped = q_NaD.float().unflatten(0, (k_KbD.shape[0], -1))
        scores = grouped @ k_KbD[:, None].float().transpose(-2, -1) * self.scale
        back = torch.arange(queries, device=scores.device)[:, None] + self.ahead
        back = back - torch.arange(keys, device=scores.device)
        hidden = back < 0 if self.window is None else (back < 0) | (back >= self.window)
        return scores.masked_fill(hidden, float("-inf"))


def _flash_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """All [1, N, rows, D]."""
    if not q.is_cuda:
        return FLASH._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    return FLASH._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
    )


@torch.no_grad()
def flash_error(
    *, query_heads: int, key_heads: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> float:
    """How far a slice's attention to itself and to a block before it, merged, is from what is written out.

    `widths` of keys and values. The largest difference of the output or a gradient, over the largest value there.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(heads, rows, width, generator=generator).to(device, dtype)

    q, grad = drawn(query_heads, PROOF_ROWS, widths[0]), drawn(query_heads, PROOF_ROWS, widths[1])
    blocks = [(drawn(key_heads, rows, widths[0]), drawn(key_heads, rows, widths[1])) for rows in (PROOF_ROWS, 40)]
    fused, plain = (_both_blocks(q, blocks, grad, flash=flash) for flash in (True, False))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(fused, plain, strict=True))


def _both_blocks(q: Tensor, blocks: list[tuple[Tensor, Tensor]], grad: Tensor, *, flash: bool) -> list[Tensor]:
    attend = [BlockAttention(q.shape[-1] ** -0.5, None, ahead, flash) for ahead in (0, blocks[1][0].shape[1])]
    outs, lses = zip(*[one(q, *block) for one, block in zip(attend, blocks, strict=True)], strict=True)
    lse = torch.logaddexp(*lses)
    out = sum(part * torch.exp(own - lse)[..., None] for part, own in zip(outs, lses, strict=True)).to(q.dtype)
    made = [one.gradients(grad, q, *block, out, lse) for one, block in zip(attend, blocks, strict=True)]
    return [out.float(), made[0][0].float() + made[1][0].float(), *(x.float() for one in made for x in one[1:])]
