"""The choice of an exchange: possible ones only, the cheapest, and none where nothing is cut."""

from gatewright.packing.cost import cpu_rates
from gatewright.packing.exchange_cost import Heads, aligned_size, choose, prices
from gatewright.packing.schedule import Slice

GROUPED = Heads(query_heads=8, key_heads=2, qk_dim=64, v_dim=64)
EQUAL = Heads(query_heads=8, key_heads=8, qk_dim=64, v_dim=64)
ALL = ("moved", "gathered", "heads")


def mirrored(ranks: int, tokens: int) -> list[list[Slice]]:
    """One document over all ranks."""
    edge = [tokens * i // (2 * ranks) for i in range(2 * ranks + 1)]
    return [[Slice(0, edge[i], edge[i + 1]) for i in (rank, 2 * ranks - 1 - rank)] for rank in range(ranks)]


def test_groups_are_the_smallest_that_hold_every_document() -> None:
    assert aligned_size([[Slice(0, 0, 4)], [Slice(1, 0, 4)]]) == 1
    pair = mirrored(2, 80)
    assert aligned_size([*pair, [Slice(1, 0, 9)], [Slice(2, 0, 9)]]) == 2
    assert aligned_size([[Slice(1, 0, 9)], *pair, [Slice(2, 0, 9)]]) == 4, "ranks 1 and 2 are no aligned pair"
    assert aligned_size([[Slice(1, 0, 9)], *mirrored(3, 90), [Slice(2, 0, 9)], []]) == 6


def test_bytes_are_those_of_the_rows() -> None:
    slices = mirrored(4, 8000)  # 2,000 tokens a rank
    found = {price.name: price.bytes for price in prices(slices, 4, heads=GROUPED, rates=cpu_rates())}
    kept = 2 * 2 * 128  # bytes of a token's keys and values
    assert found["gathered"] == 2 * kept * 3 * 2000
    assert found["ring"] == 3 * kept * 3 * 2000
    assert found["heads"] == 2 * 2 * (8 + 4) * 128 * 2000 * 3 / 4, "two key heads are repeated for four ranks"
    assert found["moved"] <= found["gathered"]


def test_many_ranks_deal_heads_and_others_do_not() -> None:
    slices = mirrored(8, 800_000)
    assert choose(slices, heads=EQUAL, rates=cpu_rates(), among=ALL) == ("heads", 8)
    odd = Heads(query_heads=9, key_heads=9, qk_dim=64, v_dim=64)
    chosen = choose(slices, heads=odd, rates=cpu_rates(), among=ALL)
    assert chosen is not None and chosen[0] != "heads", "8 ranks do not divide 9 heads"
    assert choose(slices, heads=odd, rates=cpu_rates(), among=("heads",)) == ("moved", 8)


def test_nothing_is_exchanged_where_nothing_is_cut() -> None:
    assert choose([[Slice(0, 0, 4)], []], heads=EQUAL, rates=cpu_rates(), among=ALL) is None
