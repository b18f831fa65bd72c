"""The packer against the definition of best-fit-decreasing, its bounds, and the promises of `Packs`."""

import numpy as np
import pytest

from gatewright.packing.pack import lower_bound, martello_toth_bound, pack, sum_bound
from gatewright.packing.pack_bulk import fill_in_bulk
from gatewright.packing.pack_exact import fill_exactly


def naive_best_fit(lengths, capacity, max_documents=None):
    """Number of packs when documents are placed one by one, longest first, each where the least room is left."""
    packs = []
    for length in sorted(lengths, reverse=True):
        fits = [p for p in packs if p[0] >= length and (max_documents is None or p[1] < max_documents)]
        if fits:
            best = min(fits, key=lambda p: p[0])
        else:
            best = [capacity, 0]
            packs.append(best)
        best[0] -= length
        best[1] += 1
    return len(packs)


def draws():
    """Some 300 small length sets of different character."""
    rng = np.random.default_rng(20)
    for _ in range(60):
        n, capacity = int(rng.integers(1, 120)), int(rng.integers(1, 200))
        yield rng.integers(1, capacity + 1, n), capacity
        yield np.full(n, rng.integers(1, capacity + 1)), capacity
        yield np.clip(rng.lognormal(np.log(capacity / 8 + 1), 1.2, n), 1, capacity).astype(int), capacity
        yield rng.integers(max(1, capacity // 7), max(2, capacity // 2), n).clip(max=capacity), capacity
        yield rng.choice([1, capacity, max(1, capacity // 2), max(1, capacity // 3)], n), capacity


CASES = list(draws())


def check(packs, lengths):
    lengths = np.asarray(lengths)
    assert packs.order.dtype == packs.offsets.dtype == np.int64
    assert packs.offsets[0] == 0 and packs.offsets[-1] == len(lengths)
    assert np.array_equal(np.sort(packs.order), np.arange(len(lengths)))
    for k in range(len(packs)):
        assert 0 < lengths[packs[k]].sum() <= packs.capacity
    assert packs.tokens == lengths.sum()


@pytest.mark.parametrize("seed", [None, 3])
def test_every_document_lies_in_one_pack_that_holds_it_and_there_are_as_many_packs_as_naive_best_fit(seed):
    for lengths, capacity in CASES:
        packs = pack(lengths, capacity, seed=seed, thorough=False)
        check(packs, lengths)
        assert len(packs) == naive_best_fit(lengths, capacity)


def test_packs_that_best_fit_leaves_gaps_in_are_filled_exactly():
    for lengths, capacity in CASES:
        bound = martello_toth_bound(lengths, capacity)
        for seed in (None, 4):
            packs = pack(lengths, capacity, seed=seed)
            check(packs, lengths)
            assert bound <= len(packs) <= naive_best_fit(lengths, capacity)
        for commonest in (False, True):
            placed = fill_exactly(np.bincount(lengths), capacity, commonest=commonest)
            held = np.zeros(placed.total_packs, int)
            longest_first, at = np.sort(lengths)[::-1], 0
            for first, packs_, each in zip(placed.first_pack, placed.packs, placed.each, strict=True):
                for number in range(first, first + packs_):
                    held[number] += longest_first[at : at + each].sum()
                    at += each
            assert at == len(lengths) and held.max() <= capacity and held.min() > 0
    # Best-fit puts 5 + 4 together and needs a third pack; 5 + 3 + 2 and 4 + 3 + 3 fill two.
    assert len(pack([5, 4, 3, 3, 3, 2], 10, thorough=False)) == 3
    assert len(pack([5, 4, 3, 3, 3, 2], 10)) == 2
    middling = np.random.default_rng(2).integers(300, 1100, 3000)
    assert len(pack(middling, 2000)) < len(pack(middling, 2000, thorough=False))


def shapes(documents, capacity):
    """Larger sets: smooth, clipped, in two humps, with heavy ties, of powers of two, without short documents."""
    rng = np.random.default_rng([documents, capacity])
    drawn = {
        "chat": rng.lognormal(np.log(280), 1.0, documents),
        "long tail": 16 + 0.01 * capacity * rng.pareto(1.2, documents),
        "uniform": rng.integers(1, capacity + 1, documents),
        "two humps": np.where(rng.random(documents) < 0.2, rng.normal(0.7, 0.1, documents), 0.1) * capacity,
        "ties": rng.choice([1, 7, capacity // 50, capacity // 9, capacity // 3 + 1, capacity], documents),
        "powers": 2.0 ** rng.integers(0, int(np.log2(capacity)) + 1, documents),
        "one length": np.full(documents, capacity // 11),
        "no short ones": rng.uniform(0.15 * capacity, 0.55 * capacity, documents),
    }
    return {name: np.clip(lengths, 1, capacity).astype(np.int64) for name, lengths in drawn.items()}


@pytest.mark.parametrize("capacity", [500, 4096, 32768, 131_072])
def test_sets_of_any_shape_never_take_more_packs_than_best_fit(capacity):
    for lengths in shapes(3000, capacity).values():
        # A limit that no pack can reach: placed one by one, nothing else.
        best_fit = pack(lengths, capacity, max_documents=capacity)
        for seed in (None, 1):
            packs = pack(lengths, capacity, seed=seed, thorough=False)
            check(packs, lengths)
            assert packs.lower_bound <= len(packs) <= len(best_fit)
        again = pack(lengths, capacity, seed=1, thorough=False)
        assert np.array_equal(again.order, packs.order) and np.array_equal(again.offsets, packs.offsets)


def test_filling_in_bulk_finds_a_place_for_every_document_or_says_that_it_did_not():
    reached = []
    for capacity in (500, 4096, 32768, 131_072):
        for name, lengths in shapes(5000, capacity).items():
            longest_first = np.sort(lengths)[::-1]
            bound = lower_bound(lengths, capacity)
            pack_N = fill_in_bulk(longest_first, capacity, bound)
            if pack_N is not None:
                held = np.bincount(pack_N, longest_first)
                assert len(pack_N) == 5000 and len(held) == bound and 0 < held.min() <= held.max() <= capacity
                reached.append((name, capacity))
    assert {("chat", 32768), ("long tail", 32768), ("chat", 131_072)} <= set(reached)
    assert ("no short ones", 4096) not in reached
    assert fill_in_bulk(np.array([5, 5, 4, 4, 4, 4]), 14, 2).tolist() == [0, 0, 0, 1, 1, 1]
    # The tokens would fit, but neither pack has room for the 4 beside a 6.
    assert fill_in_bulk(np.array([6, 6, 4, 1]), 9, 2) is None


def test_limit_on_documents_in_a_pack():
    for lengths, capacity in CASES[::3]:
        for limit in (1, 2, 5):
            packs = pack(lengths, capacity, max_documents=limit)
            check(packs, lengths)
            assert np.diff(packs.offsets).max() <= limit
            assert packs.lower_bound <= len(packs)
            assert len(packs) == len(pack(lengths, capacity, max_documents=limit, seed=5))
    assert len(pack([1] * 10, 100, max_documents=3)) == naive_best_fit([1] * 10, 100, 3) == 4


def test_bounds_are_below_every_packing_and_tight_where_that_can_be_seen():
    for lengths, capacity in CASES:
        l1, l2 = sum_bound(lengths, capacity), martello_toth_bound(lengths, capacity)
        assert l1 <= l2 <= lower_bound(lengths, capacity) <= len(pack(lengths, capacity))
    over_half = np.array([6, 6, 6, 6])
    assert (sum_bound(over_half, 10), martello_toth_bound(over_half, 10)) == (3, 4)
    # Two packs of 7 leave 3 each, too little for a 4: the 4s need a third pack.
    beside = np.array([7, 7, 4, 4])
    assert (sum_bound(beside, 10), martello_toth_bound(beside, 10)) == (3, 3)
    assert martello_toth_bound(np.array([7, 7, 7, 4, 4]), 10) == 4


def fewest_packs(lengths, capacity):
    """By trying everything: each document, longest first, into every pack that has room, or a new one."""
    best = len(lengths)

    def place(k, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if k == len(lengths):
            best = len(rooms)
            return
        for room in {r for r in rooms if r >= lengths[k]}:
            place(k + 1, [*rooms[: rooms.index(room)], *rooms[rooms.index(room) + 1 :], room - lengths[k]])
        place(k + 1, [*rooms, capacity - lengths[k]])

    place(0, [])
    return best


def test_no_packing_at_all_is_below_the_bounds():
    rng = np.random.default_rng(9)
    tight = 0
    for _ in range(300):
        capacity = int(rng.integers(5, 30))
        low = int(rng.integers(1, capacity // 2 + 1))
        lengths = np.sort(rng.integers(low, low + rng.integers(1, capacity // 2), rng.integers(1, 9)))[::-1]
        fewest = fewest_packs(lengths.tolist(), capacity)
        assert martello_toth_bound(lengths, capacity) <= lower_bound(lengths, capacity) <= fewest
        assert fewest <= len(pack(lengths, capacity))
        tight += martello_toth_bound(lengths, capacity) < lower_bound(lengths, capacity)
    assert tight > 3
    # A third document of 4 never fits into 11: five need three packs, though two would hold their tokens.
    assert (martello_toth_bound(np.full(5, 4), 11), lower_bound(np.full(5, 4), 11)) == (2, 3)


def martello_toth_by_definition(lengths, capacity):
    best = 0
    for a in range(capacity // 2 + 1):
        alone = [w for w in lengths if w > capacity - a]
        big = [w for w in lengths if capacity // 2 < w <= capacity - a]
        small = [w for w in lengths if a <= w <= capacity // 2]
        extra = -(-(sum(small) - (len(big) * capacity - sum(big))) // capacity)
        best = max(best, len(alone) + len(big) + max(0, extra))
    return best


def test_martello_toth_bound_is_its_definition():
    for lengths, capacity in CASES[::2]:
        assert martello_toth_bound(lengths, capacity) == martello_toth_by_definition(lengths.tolist(), capacity)


def test_a_seed_repeats_itself_and_moves_documents_only_among_equals():
    lengths = np.random.default_rng(1).integers(1, 40, 500)
    first, again, other = pack(lengths, 64, seed=7), pack(lengths, 64, seed=7), pack(lengths, 64, seed=8)
    assert np.array_equal(first.order, again.order) and np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.order, other.order)

    def contents(packs):
        return sorted(tuple(lengths[packs[k]]) for k in range(len(packs)))

    assert contents(first) == contents(other) == contents(pack(lengths, 64))


def test_known_draw_is_the_same_on_every_machine():
    packs = pack([3, 3, 2, 2, 1, 5, 5, 3], 8, seed=[7, 0])
    assert [packs[k].tolist() for k in range(len(packs))] == [[6, 0], [1, 2, 3, 4], [5, 7]]


def test_documents_of_a_pack_are_longest_first():
    lengths = np.random.default_rng(2).integers(1, 100, 300)
    packs = pack(lengths, 256, seed=0)
    assert all((np.diff(lengths[packs[k]]) <= 0).all() for k in range(len(packs)))


def test_edges():
    empty = pack([], 10, seed=1)
    assert len(empty) == 0 and empty.fill == 1.0 and empty.lower_bound == 0
    one = pack([1], 1)
    assert len(one) == 1 and one.fill == 1.0 and one[0].tolist() == [0]
    assert len(pack([4] * 9, 8)) == 5
    assert pack([8, 8], 8).fill == 1.0


def test_a_million_documents_of_one_length():
    packs = pack(np.full(1_000_000, 300), 4096, seed=0)
    assert len(packs) == -(-1_000_000 // 13)
    assert np.diff(packs.offsets).max() == 13


@pytest.mark.parametrize(
    ("lengths", "capacity", "says"),
    [
        ([3, 12, 5], 10, r"document 1 has 12 tokens, more than a pack can hold \(10\)"),
        ([3, 0], 10, "document 1 has 0 tokens"),
        ([3.5], 10, "lengths are float64"),
        (["7"], 10, "lengths are <U1"),
        ([3], 0, "capacity is 0 tokens"),
    ],
)
def test_lengths_that_cannot_be_packed(lengths, capacity, says):
    with pytest.raises(ValueError, match=says):
        pack(lengths, capacity)
