"""Attention over packed documents: every kernel against the written-out reference, and no look across a boundary."""

from itertools import pairwise

import pytest
import torch

from gatewright.model.attention import attend_each_document, attend_plain, choose_kernel, through_flash
from gatewright.model.attention_slices import SliceAttention, attend_each_slice, bounds_of

CPU = torch.device("cpu")
LENGTHS = [5, 1, 17, 9]
QUERY_LENGTHS = [2, 1, 17, 4]
"""Of slices whose documents begin before them, but for the second and the third."""


def packed(heads: int, key_heads: int, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(1, n, total, 8, dtype=dtype, requires_grad=True) for n in (heads, key_heads, key_heads))
    return q, k, v, torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3, 8])
def test_sdpa_per_document_equals_the_reference(key_heads: int, window: int | None) -> None:
    q, k, v, cu = packed(4, key_heads)
    ours = attend_each_document(q, k, v, cu, max(LENGTHS), 0.3, window)
    reference = attend_plain(q, k, v, cu, 0.3, window)
    torch.testing.assert_close(ours, reference)
    weight = torch.randn_like(ours)
    for got, wanted in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, v)),
        torch.autograd.grad((reference * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_a_document_never_sees_its_neighbours() -> None:
    q, k, v, cu = packed(4, 2, dtype=torch.float32)
    clean = attend_each_document(q, k, v, cu, max(LENGTHS), 0.3, None)
    poisoned = [x.detach().clone() for x in (q, k, v)]
    for x in poisoned:
        x[:, :, 6:23] += 100.0  # the third document
    after = attend_each_document(*poisoned, cu, max(LENGTHS), 0.3, None)
    assert torch.equal(clean[:, :6], after[:, :6])
    assert torch.equal(clean[:, 23:], after[:, 23:])
    assert not torch.equal(clean[:, 6:23], after[:, 6:23])


def test_a_sink_takes_probability_and_a_soft_cap_bounds_scores() -> None:
    q, k, v, cu = packed(4, 4)
    plain = attend_plain(q, k, v, cu, 0.3)
    absent = torch.full((4,), float("-inf"), dtype=torch.float64)
    torch.testing.assert_close(attend_plain(q, k, v, cu, 0.3, sinks_N=absent), plain)
    overwhelming = torch.full((4,), 1e4, dtype=torch.float64)
    assert attend_plain(q, k, v, cu, 0.3, sinks_N=overwhelming).abs().max() < 1e-6
    torch.testing.assert_close(attend_plain(q, k, v, cu, 0.3, softcap=1e6), plain, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(attend_plain(q, k, v, cu, 3.0, softcap=0.5), attend_plain(q, k, v, cu, 3.0))


def test_values_of_another_size_than_keys() -> None:
    """As in multi-head latent attention."""
    q, k, v, cu = packed(4, 4)
    v = torch.randn(1, 4, sum(LENGTHS), 5, dtype=torch.float64)
    torch.testing.assert_close(
        attend_each_document(q, k, v, cu, max(LENGTHS), 0.3, None), attend_plain(q, k, v, cu, 0.3)
    )


def test_a_cpu_says_which_kernel_it_takes_and_why() -> None:
    kernel = choose_kernel(torch.device("cpu"), torch.bfloat16)
    assert kernel.name == "sdpa per document"
    assert "cpu has no varlen kernel" in kernel.reason


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, most_q: int, most_k: int,
    *, softmax_scale: float, causal: bool, window_size: tuple[int, int], deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    """What flash-attn 2.1 and later document of `flash_attn_varlen_func`: masks aligned to the bottom right corner."""
    assert causal and deterministic and q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert most_q == cu_q.diff().max() and most_k == cu_k.diff().max()
    out = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        keys, values = (x[c:d].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q[a:b], keys) * softmax_scale
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else distance < 0)
        out.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    return torch.cat(out)


@pytest.mark.parametrize("width", [8, 5], ids=["equal widths", "narrow values"])
@pytest.mark.parametrize("window", [None, 3, 8])
def test_slices_through_a_varlen_kernel_equal_sdpa_and_whole_documents(window: int | None, width: int) -> None:
    q, k, v, cu = packed(4, 2)
    v = v.detach()[..., :width].clone().requires_grad_()
    last = torch.cat([torch.arange(end - n, end) for n, end in zip(QUERY_LENGTHS, cu[1:].tolist(), strict=True)])
    kernel = through_flash(varlen, name="stand-in")
    bounds = bounds_of(QUERY_LENGTHS, LENGTHS, CPU)
    weight = torch.randn(1, sum(QUERY_LENGTHS), 4, width, dtype=q.dtype)
    made = []
    for attend in (
        lambda: SliceAttention(0.3, window, kernel.attend_slices, kernel.equal_widths)(q[:, :, last], k, v, bounds),
        lambda: SliceAttention(0.3, window, attend_each_slice, equal_widths=False)(q[:, :, last], k, v, bounds),
        lambda: attend_plain(q, k, v, cu, 0.3, window)[:, last],
    ):
        out = attend()
        made.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
    for tensors in zip(*made, strict=True):
        torch.testing.assert_close(tensors[0], tensors[2])
        torch.testing.assert_close(tensors[1], tensors[2])


def test_documents_through_a_varlen_kernel_equal_the_reference() -> None:
    q, k, v, cu = packed(4, 2)
    out = through_flash(varlen, name="stand-in").attend(q, k, v, cu, max(LENGTHS), 0.3, 8)
    torch.testing.assert_close(out, attend_plain(q, k, v, cu, 0.3, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 8])
def test_the_gpu_kernel_from_slices_equals_sdpa(window: int | None) -> None:
    q, k, v, _ = (x.cuda() for x in packed(4, 2, dtype=torch.float32))
    q = q[:, :, : sum(QUERY_LENGTHS)]
    kernel, bounds = choose_kernel(q.device, torch.bfloat16), bounds_of(QUERY_LENGTHS, LENGTHS, q.device)
    half = SliceAttention(0.3, window, kernel.attend_slices, kernel.equal_widths)
    got = half(q.bfloat16(), k.bfloat16(), v.bfloat16(), bounds)
    torch.testing.assert_close(got.float(), attend_each_slice(q, k, v, bounds, 0.3, window), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 8])
def test_the_gpu_kernel_equals_the_reference(window: int | None) -> None:
    q, k, v, cu = (x.cuda() for x in packed(4, 2, dtype=torch.float32))
    kernel = choose_kernel(torch.device("cuda"), torch.bfloat16)
    half = [x.bfloat16() for x in (q, k, v)]
    got = kernel.attend(*half, cu, max(LENGTHS), 0.3, window)
    torch.testing.assert_close(got.float(), attend_plain(q, k, v, cu, 0.3, window), atol=2e-2, rtol=2e-2)
