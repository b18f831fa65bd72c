"""Attention over packed documents: every kernel against the written-out reference, and no look across a boundary."""

import pytest
import torch

from gatewright.model.attention import attend_each_document, attend_plain, choose_kernel

LENGTHS = [5, 1, 17, 9]


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 8])
def test_the_gpu_kernel_equals_the_reference(window: int | None) -> None:
    q, k, v, cu = (x.cuda() for x in packed(4, 2, dtype=torch.float32))
    kernel = choose_kernel(torch.device("cuda"), torch.bfloat16)
    half = [x.bfloat16() for x in (q, k, v)]
    got = kernel.attend(*half, cu, max(LENGTHS), 0.3, window)
    torch.testing.assert_close(got.float(), attend_plain(q, k, v, cu, 0.3, window), atol=2e-2, rtol=2e-2)
