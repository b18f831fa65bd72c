"""Documents dealt many at a time lie where dealing them one by one would put them, and gaps are filled to the end."""

import numpy as np
import pytest

from gatewright.packing.schedule_deal import deal, fill_up


def draw(seed, bins, documents=200):
    """Works and tokens longest first, and bins that hold something already."""
    rng = np.random.default_rng(seed)
    tokens = -np.sort(-rng.integers(1, 2000, documents))
    return tokens * 1e-3 + tokens**2 * 1e-6, tokens, rng.random(bins) * 2, rng.integers(0, 20_000, bins)


def one_by_one(works, tokens, loads, rooms):
    """Longest first, each where least is to do among bins with room."""
    bins = []
    for work, held in zip(works, tokens, strict=True):
        bins.append(min((b for b in range(len(loads)) if rooms[b] >= held), key=lambda b: loads[b]))
        loads[bins[-1]] += work
        rooms[bins[-1]] -= held
    return bins


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bins", [1, 2, 7, 64, 300])
def test_with_room_for_all_it_is_longest_first(seed, bins):
    works, tokens, loads, _ = draw(seed, bins)
    rooms, copies = np.full(bins, 10**9), (loads.copy(), np.full(bins, 10**9))
    assert deal(works, tokens, loads, rooms, np.inf).tolist() == one_by_one(works, tokens, *copies)
    assert (loads == copies[0]).all() and (rooms == copies[1]).all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dealt", [deal, fill_up])
def test_no_bin_is_over_its_room_or_late_and_nothing_is_left_that_fits(seed, dealt):
    works, tokens, loads, rooms = draw(seed, 1 + seed * 2)
    before_s, before = loads.copy(), rooms.copy()
    limit_s = 3.0
    bins = dealt(works, tokens, loads, rooms, limit_s)
    held = bins >= 0
    assert (rooms == before - np.bincount(bins[held], tokens[held], minlength=len(rooms))).all() and rooms.min() >= 0
    assert loads == pytest.approx(before_s + np.bincount(bins[held], works[held], minlength=len(loads)))
    assert loads.max() <= limit_s * (1 + 1e-12)
    for work, length in zip(works[~held], tokens[~held], strict=True):
        assert not ((rooms >= length) & (loads + work <= limit_s * (1 - 1e-12))).any()
