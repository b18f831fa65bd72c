"""The endless stream of packs: a step number alone says which documents it holds."""

import numpy as np
import pytest

from gatewright.packing.epoch import EpochPlan

LENGTHS = np.random.default_rng(4).integers(1, 30, 200)


@pytest.mark.parametrize("packed", [True, False])
def test_every_epoch_holds_each_document_once_in_another_draw(packed):
    plan = EpochPlan(LENGTHS, capacity=64, seed=1, pack=packed)
    first, second = plan.packs(0), plan.packs(1)
    assert len(first) == len(second) == plan.packs_per_epoch
    for epoch in (first, second):
        assert sorted(epoch.order.tolist()) == list(range(200))
    assert first.order.tolist() != second.order.tolist()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("per_step", [1, 3, 7])
def test_steps_read_the_concatenation_of_epochs_from_any_starting_point(packed, per_step):
    plan = EpochPlan(LENGTHS, capacity=64, seed=1, pack=packed)
    stream = [plan.packs(e)[k].tolist() for e in range(4) for k in range(plan.packs_per_epoch)]
    steps = 3 * plan.packs_per_epoch // per_step
    forward = [[m.tolist() for m in plan.micro_batches(step, per_step)] for step in range(steps)]
    assert [held for step in forward for held in step] == stream[: steps * per_step]
    fresh = EpochPlan(LENGTHS, capacity=64, seed=1, pack=packed)
    for step in reversed(range(steps)):
        assert [m.tolist() for m in fresh.micro_batches(step, per_step)] == forward[step]


def test_a_step_may_be_longer_than_an_epoch():
    plan = EpochPlan(np.array([5, 5, 5]), capacity=5, seed=0)
    held = np.concatenate(plan.micro_batches(0, 7))
    assert plan.packs_per_epoch == 3
    assert np.bincount(held).sum() == 7 and np.bincount(held).min() == 2


def test_seeds_differ_and_evaluation_is_untouched_by_them():
    one, two = EpochPlan(LENGTHS, capacity=64, seed=1), EpochPlan(LENGTHS, capacity=64, seed=2)
    assert one.packs(0).order.tolist() != two.packs(0).order.tolist()
    assert one.in_order().order.tolist() == two.in_order().order.tolist()


def test_without_packing_a_micro_batch_is_one_document():
    plan = EpochPlan(LENGTHS, capacity=64, seed=1, pack=False)
    assert plan.packs_per_epoch == 200
    assert all(len(m) == 1 for m in plan.micro_batches(3, 11))
    assert plan.packs(0).fill == LENGTHS.sum() / (200 * 64)


@pytest.mark.parametrize("packed", [True, False])
def test_a_document_over_the_capacity(packed):
    with pytest.raises(ValueError, match="29 tokens, more than a"):
        EpochPlan(LENGTHS, capacity=20, seed=1, pack=packed)
