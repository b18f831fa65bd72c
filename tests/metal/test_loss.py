"""The chunked loss against torch's cross-entropy: value and every gradient, whatever the chunk size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gatewright.model.head import Head
from gatewright.train.loss import token_loss_sum


def head_with(
    weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0, softcap: float | None = None
) -> Head:
    linear = nn.Linear(1, 1, bias=False)
    linear.weight, linear.bias = None, None
    del linear._parameters["weight"], linear._parameters["bias"]
    linear.weight, linear.bias = weight, bias
    return Head(linear, scale, softcap)


def reference(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head.logits(hidden).float(), labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize(
    ("scale", "softcap", "bias"), [(1.0, None, False), (0.25, None, True), (1.0, 3.0, False), (2.0, 5.0, True)]
)
def test_value_and_gradients(chunk_tokens: int, scale: float, softcap: float | None, bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(33, 12, requires_grad=True)
    weight = torch.randn(50, 12, requires_grad=True)
    offset = torch.randn(50, requires_grad=True) if bias else None
    labels = torch.randint(0, 50, (33,))
    labels[::3] = -100
    head = head_with(weight, offset, scale, softcap)
    inputs = [x for x in (hidden, weight, offset) if x is not None]

    ours = token_loss_sum(hidden, head, labels, chunk_tokens=chunk_tokens)
    wanted = reference(hidden, head, labels)
    torch.testing.assert_close(ours, wanted)
    for got, want in zip(torch.autograd.grad(ours / 22, inputs), torch.autograd.grad(wanted / 22, inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_no_label_costs_nothing() -> None:
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(9, 4)
    loss = token_loss_sum(hidden, head_with(weight), torch.full((5,), -100), chunk_tokens=2)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros(5, 4))
    assert weight.grad is None


def test_bfloat16_stays_close_to_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(100, 32) * 0.2
    labels = torch.randint(0, 100, (64,))
    exact = token_loss_sum(hidden, head_with(weight), labels, chunk_tokens=16)
    rounded = token_loss_sum(hidden.bfloat16(), head_with(weight.bfloat16()), labels, chunk_tokens=16)
    assert abs(rounded / exact - 1) < 1e-2


def test_logits_of_all_tokens_never_exist() -> None:
    """The largest tensor made is a chunk of logits: watched on every operation of forward and backward."""
    tokens, vocab, chunk = 512, 3000, 32
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        labels = torch.randint(0, vocab, (tokens,))
        token_loss_sum(hidden, head_with(weight), labels, chunk_tokens=chunk).backward()
    assert largest == chunk * vocab
