"""Puts packs that cost about the same into the same step, and shuffles the steps.

Ranks wait for the slowest of them. Packs hold about as many tokens each, but their attention differs by a factor of
several: side by side in a step belong those whose costs are neighbours.
"""

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.pack import Packs, Seed

KNEE_TOKENS = 16_384
"""Length at which a document's attention is taken to cost as much as all the rest; orders packs, and hardly depends."""


def pack_costs(packs: Packs, lengths_N: IntArray, *, knee_tokens: int = KNEE_TOKENS) -> IntArray:
    """[packs] cost of each in whole units: of a document of s tokens s · (knee + s)."""
    if not len(packs):
        return np.zeros(0, np.int64)
    held = lengths_N[packs.order]
    return np.add.reduceat(held * (knee_tokens + held), packs.offsets[:-1])


def alike_in_steps(
    packs: Packs, lengths_N: IntArray, *, per_step: int, lead: int = 0, seed: Seed, knee_tokens: int = KNEE_TOKENS
) -> Packs:
    """The same packs in another order: each run of `per_step` has neighbouring costs, the runs are shuffled.

    lead: packs in front that complete a step begun before. They, and those of the last, incomplete step, are drawn.
    Within a step the dearest comes first, so that ranks that take packs in turn always hold neighbours.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    steps = max(0, len(packs) - lead) // per_step
    loose = draw.permutation(len(packs))[: len(packs) - steps * per_step]
    rest = np.setdiff1d(np.arange(len(packs)), loose)
    costs = pack_costs(packs, lengths_N, knee_tokens=knee_tokens)
    by_cost = rest[np.argsort(-costs[rest], kind="stable")].reshape(steps, per_step)
    return in_order(packs, np.concatenate((loose[:lead], by_cost[draw.permutation(steps)].reshape(-1), loose[lead:])))


def idle_share(packs: Packs, lengths_N: IntArray, *, ranks: int, knee_tokens: int = KNEE_TOKENS) -> float:
    """Share of their time that ranks wait when each takes every so-many-th pack and all wait after each: 0 to 1."""
    rounds = len(packs) // ranks
    if not rounds:
        return 0.0
    costs = pack_costs(packs, lengths_N, knee_tokens=knee_tokens)[: rounds * ranks].reshape(rounds, ranks)
    return 1.0 - float(costs.sum()) / (ranks * float(costs.max(axis=1).sum()))


def in_order(packs: Packs, order_P: IntArray) -> Packs:
    """The packs by these numbers."""
    sizes = np.diff(packs.offsets)[order_P]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    entry = np.arange(len(packs.order)) + np.repeat(packs.offsets[:-1][order_P] - offsets[:-1], sizes)
    return Packs(
        order=packs.order[entry],
        offsets=offsets,
        capacity=packs.capacity,
        tokens=packs.tokens,
        lower_bound=packs.lower_bound,
    )
