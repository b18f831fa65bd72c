"""Learning-rate courses by their corner values, and an optimizer state that comes back to the bit."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from gatewright.spec.errors import CheckpointError
from gatewright.spec.run import Train
from gatewright.train.optim import build_optimizer, learning_rate, optimizer_tensors, restore_optimizer, trainable


def course(steps: int = 100, **changes: object) -> list[float]:
    train = Train(**{"tokens_per_step": 1, "steps": steps, "lr": 1.0} | changes)
    return [learning_rate(step, steps=steps, train=train) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert course(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_halves_in_the_middle_and_ends_just_above_its_floor() -> None:
    lrs = course(min_lr_fraction=0.1)
    assert lrs[0] == 1.0
    assert lrs[50] == pytest.approx(0.55)
    assert 0.1 < lrs[-1] < 0.101


def test_linear_falls_evenly() -> None:
    lrs = course(schedule="linear", warmup_steps=20)
    assert lrs[20] == 1.0
    assert lrs[60] == pytest.approx(0.5)
    assert [round(a - b, 9) for a, b in pairwise(lrs[20:])] == [round(1 / 80, 9)] * 79


def test_wsd_holds_and_then_decays() -> None:
    lrs = course(schedule="wsd", decay_fraction=0.2)
    assert lrs[:81] == [1.0] * 81
    assert lrs[90] == pytest.approx(0.5)


def test_constant_stays() -> None:
    assert set(course(schedule="constant")) == {1.0}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def test_decay_touches_matrices_only() -> None:
    optimizer = build_optimizer(trainable(model()), Train(tokens_per_step=1, steps=1, lr=0.1, weight_decay=0.5))
    groups = [(group["weight_decay"], {p.dim() for p in group["params"]}) for group in optimizer.param_groups]
    assert groups == [(0.5, {2}), (0.0, {1})]


def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened() -> None:
    settings = Train(tokens_per_step=1, steps=1, lr=0.1)
    straight = model()
    optimizer = build_optimizer(trainable(straight), settings)
    for seed in range(3):
        step(straight, optimizer, seed)
    resumed = model()
    resumed.load_state_dict(straight.state_dict())
    second = build_optimizer(trainable(resumed), settings)
    restore_optimizer(second, trainable(resumed), optimizer_tensors(optimizer, trainable(straight)))
    for seed in range(3, 6):
        step(straight, optimizer, seed)
        step(resumed, second, seed)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_other_weights_is_refused() -> None:
    net = model()
    optimizer = build_optimizer(trainable(net), Train(tokens_per_step=1, steps=1, lr=0.1))
    with pytest.raises(CheckpointError, match=r"optimizer state of 9\.weight, which this run does not train"):
        restore_optimizer(optimizer, trainable(net), {"9.weight/exp_avg": torch.zeros(3)})
