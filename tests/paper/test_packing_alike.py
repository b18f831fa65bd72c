"""Steps of packs that cost alike: the same packs, aligned with steps through all epochs, and less waiting."""

import numpy as np
import pytest

from gatewright.packing.alike import alike_in_steps, idle_share, pack_costs
from gatewright.packing.epoch import EpochPlan
from gatewright.packing.pack import pack

LENGTHS = np.clip(np.random.default_rng(8).lognormal(5, 1.3, 2000), 1, 4096).astype(np.int64)


def contents(packs):
    return sorted(tuple(packs[k].tolist()) for k in range(len(packs)))


@pytest.mark.parametrize("per_step", [1, 7, 16, 10_000])
@pytest.mark.parametrize("lead", [0, 5])
def test_packs_stay_as_they_are_and_only_move(per_step, lead):
    packs = pack(LENGTHS, 4096, seed=1)
    moved = alike_in_steps(packs, LENGTHS, per_step=per_step, lead=lead, seed=2)
    assert contents(moved) == contents(packs)
    assert moved.offsets[-1] == len(LENGTHS) and len(moved) == len(packs)
    again = alike_in_steps(packs, LENGTHS, per_step=per_step, lead=lead, seed=2)
    assert np.array_equal(again.order, moved.order)
    other = alike_in_steps(packs, LENGTHS, per_step=per_step, lead=lead, seed=3)
    assert not np.array_equal(other.order, moved.order)


def test_costs_are_those_of_their_documents():
    packs = pack([5, 3, 3, 2], 8, seed=0)
    by_hand = [sum(n * (10 + n) for n in np.array([5, 3, 3, 2])[packs[k]].tolist()) for k in range(len(packs))]
    assert pack_costs(packs, np.array([5, 3, 3, 2]), knee_tokens=10).tolist() == by_hand
    assert len(pack_costs(pack([], 8), np.zeros(0, np.int64))) == 0


def waiting(plan, per_step, steps):
    """Time of steps in which each of `per_step` ranks has one pack, over their mean work."""
    squares = LENGTHS.astype(float) ** 2
    costs = [[squares[m].sum() for m in plan.micro_batches(step, per_step)] for step in range(steps)]
    return sum(map(max, costs)) / sum(sum(step) / per_step for step in costs)


def test_ranks_of_a_step_wait_less_in_every_epoch():
    plain = EpochPlan(LENGTHS, capacity=4096, seed=1)
    alike = EpochPlan(LENGTHS, capacity=4096, seed=1, alike_per_step=8)
    steps = 3 * plain.packs_per_epoch // 8
    assert waiting(alike, 8, steps) < 1 + (waiting(plain, 8, steps) - 1) / 3


def test_the_idle_share_is_what_ranks_wait_for_the_dearest_pack_of_each_round():
    lengths = np.array([8, 4, 6, 6])
    packs = pack(lengths, 8, max_documents=1)
    costs = {n: n * (10 + n) for n in (8, 6, 4)}
    assert packs.order.tolist() == [0, 2, 3, 1]
    together = costs[8] + 2 * costs[6] + costs[4]
    expected = 1 - together / (2 * (costs[8] + costs[6]))
    assert idle_share(packs, lengths, ranks=2, knee_tokens=10) == pytest.approx(expected)
    assert idle_share(packs, lengths, ranks=5) == 0.0
    drawn = pack(LENGTHS, 4096, seed=1)
    alike = alike_in_steps(drawn, LENGTHS, per_step=8, seed=2)
    assert idle_share(alike, LENGTHS, ranks=8) < idle_share(drawn, LENGTHS, ranks=8) / 3


def test_steps_are_a_pure_function_of_their_number():
    plan = EpochPlan(LENGTHS, capacity=4096, seed=1, alike_per_step=8)
    steps = 2 * plan.packs_per_epoch // 8
    forward = [[m.tolist() for m in plan.micro_batches(step, 8)] for step in range(steps)]
    fresh = EpochPlan(LENGTHS, capacity=4096, seed=1, alike_per_step=8)
    for step in reversed(range(steps)):
        assert [m.tolist() for m in fresh.micro_batches(step, 8)] == forward[step]
    held = np.concatenate([m for step in forward for m in step])
    assert np.bincount(held).max() <= 2
    assert sorted(plan.packs(1).order.tolist()) == list(range(len(LENGTHS)))
