"""The gain of packing and of limits, against plain sums, and the trap that halving a limit does not halve the time."""

import numpy as np
import pytest

from gatewright.packing.gain import limit_gain, packed_cost, packing_gain, padded_cost
from gatewright.packing.lengths import padded_fill, padded_lengths
from gatewright.planner.catalogue import find_shape
from gatewright.planner.time import knee_tokens

KNEE = 10_000


def campaign(documents: int = 4000) -> np.ndarray:
    """Lengths of conversations: most are short, a few reach the limit of 8,192."""
    lengths = np.random.default_rng(0).lognormal(mean=7.2, sigma=0.8, size=documents)
    return np.clip(lengths, 16, 8192).astype(np.int64)


def by_hand(lengths: list[int], knee: int | None) -> float:
    return sum(n + (n * n / knee if knee else 0) for n in lengths)


@pytest.mark.parametrize("knee", [None, 1, KNEE])
def test_costs_are_the_sums_they_say(knee: int | None) -> None:
    lengths = campaign(101)
    assert packed_cost(lengths, knee_tokens=knee) == pytest.approx(by_hand(lengths.tolist(), knee))
    slots = padded_lengths(lengths, batch_size=4)
    assert len(slots) == 101 and (np.sort(slots) >= np.sort(lengths)).all()
    assert padded_cost(lengths, batch_size=4, knee_tokens=knee) == pytest.approx(by_hand(slots.tolist(), knee))


def test_without_attention_the_gain_is_the_fill() -> None:
    lengths = campaign()
    gain = packing_gain(lengths, batch_size=8, knee_tokens=None)
    assert gain == pytest.approx(1 / padded_fill(lengths, batch_size=8))
    assert packing_gain(lengths, batch_size=8, knee_tokens=KNEE) > gain > 1.5
    assert packing_gain(lengths, batch_size=1, knee_tokens=KNEE) == 1.0


def test_halving_the_limit_gains_far_less_than_hoped() -> None:
    """A campaign that went from 8,192 to 4,096 measured 1.2×; a fourfold gain had been hoped for."""
    gain = limit_gain(campaign(), 4096, batch_size=1, knee_tokens=3000)
    assert gain.hoped > 3 and 1.1 < gain.padded < 1.4
    assert gain.padded == gain.packed, "batches of one document have no padding"
    assert gain.tokens_lost == int((campaign() - np.minimum(campaign(), 4096)).sum()) > 0


def test_a_limit_above_the_longest_changes_nothing() -> None:
    gain = limit_gain(campaign(), 10_000, batch_size=4, knee_tokens=KNEE)
    assert (gain.hoped, gain.padded, gain.packed, gain.tokens_lost) == (1.0, 1.0, 1.0, 0)


def test_a_million_long_documents_do_not_overflow() -> None:
    lengths = np.full(1_000_000, 1_000_000)
    assert packed_cost(lengths, knee_tokens=1) == pytest.approx(1e18, rel=1e-3)


def test_nothing_to_price_is_refused() -> None:
    with pytest.raises(ValueError, match="0 documents and a limit of 10"):
        limit_gain(np.array([], dtype=np.int64), 10, batch_size=4, knee_tokens=None)
    with pytest.raises(ValueError, match="a limit of 0"):
        limit_gain(campaign(), 0, batch_size=4, knee_tokens=None)
    assert packing_gain(np.array([], dtype=np.int64), batch_size=4, knee_tokens=None) == 1.0


def test_attention_weighs_more_where_few_parameters_are_active() -> None:
    dense, sparse = knee_tokens(find_shape("Qwen3-8B")), knee_tokens(find_shape("Qwen3-30B-A3B"))
    assert 8_000 < sparse < 12_000 < 30_000 < dense
