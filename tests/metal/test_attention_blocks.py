"""Attention to blocks: by flash kernels and written out, merged, against whole attention; outputs and gradients."""

import pytest
import torch

from gatewright.model.attention_blocks import BlockAttention, flash_error

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("widths", [(8, 8), (24, 16)], ids=["equal widths", "narrow values"])
def test_flash_kernels_equal_the_formula(dtype: torch.dtype, most: float, widths: tuple[int, int]) -> None:
    assert 0 < flash_error(query_heads=6, key_heads=2, widths=widths, dtype=dtype, device=CPU) < most


def test_flash_keeps_no_scores() -> None:
    """Where it is not taken, scores of 2,048 queries and keys and 4 heads are 64 MiB."""
    x = torch.randn(4, 2048, 16)
    for flash, largest in ((True, 4 << 20), (False, 64 << 20)):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            BlockAttention(0.25, None, 0, flash)(x, x, x)
        taken = max(event.cpu_memory_usage for event in profile.events())
        assert (taken >= largest) == (not flash)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("flash", [True, False])
def test_blocks_merge_to_the_whole_document(window: int | None, flash: bool) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(heads, 30, 8) for heads in (4, 2, 2, 4))
    wanted = whole(q, k, v, grad, window)
    blocks = [(0, 12), (12, 30)]
    mine = slice(12, 30)
    parts = [(BlockAttention(0.3, window, 12 - a, flash), slice(a, b)) for a, b in reversed(blocks)]
    seen = [attend(q[:, mine], k[:, rows], v[:, rows]) for attend, rows in parts]
    lse = torch.logaddexp(seen[0][1], seen[1][1])
    out = sum(part * torch.exp(own - lse)[..., None] for part, own in seen)
    torch.testing.assert_close(out, wanted[0][:, mine])
    dq = torch.zeros(4, 18, 8)
    for attend, rows in parts:
        made = attend.gradients(grad[:, mine], q[:, mine], k[:, rows], v[:, rows], out, lse)
        dq += made[0]
        if rows.start == 12:  # later keys have no other queries
            torch.testing.assert_close(made[1], wanted[2][:, rows])
            torch.testing.assert_close(made[2], wanted[3][:, rows])
    torch.testing.assert_close(dq, wanted[1][:, mine])


def whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, window: int | None
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v by autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, dim=0).transpose(1, 2) * 0.3
    back = torch.arange(30)[:, None] - torch.arange(30)
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ leaves[2].repeat_interleave(2, dim=0)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_flash_kernels_equal_the_formula() -> None:
    error = flash_error(query_heads=8, key_heads=2, widths=(64, 64), dtype=torch.bfloat16, device=torch.device("cuda"))
    assert 0 < error < 2e-2
