"""The exchange of keys and values: every slice finds exactly the rows that it looks at, whoever holds them."""

import random

import numpy as np
import pytest

from gatewright.packing.cost import CostModel
from gatewright.packing.exchange import plan_exchange
from gatewright.packing.schedule import Slice, schedule

COSTS = CostModel(token_s=1e-6, attention_s=1e-9, near_s=1e-8, far_s=1e-7, hop_s=1e-6, slot_s=1e-5, ranks_per_node=8)


def check(slices: list[list[Slice]]) -> int:
    """Plays the exchange with rows that know where they come from; returns how many travelled."""
    own = [[(p.document, at) for p in held for at in range(p.start, p.end)] for held in slices]
    plans = [plan_exchange(slices, rank) for rank in range(len(slices))]
    for rank, plan in enumerate(plans):
        received = [own[other][row] for other in range(len(slices)) for row in plans[other].send_rows[rank]]
        counts = [len(plans[other].send_rows[rank]) for other in range(len(slices))]
        assert tuple(counts) == plan.receive_counts
        rows = own[rank] + received
        looked_at = [rows[row] for row in plan.key_rows]
        wanted = [(p.document, at) for p in slices[rank] for at in range(p.end)]
        assert looked_at == wanted
        assert len(set(received)) == len(received) and not set(received) & set(own[rank]), "each row once"
        assert plan.key_lengths == tuple(p.end for p in slices[rank])
    return sum(plan.sends for plan in plans)


def test_only_what_the_mask_shows_travels() -> None:
    slices = [[Slice(0, 0, 4), Slice(0, 12, 16)], [Slice(0, 4, 12)]]
    assert check(slices) == 8 + 4
    assert check([[Slice(0, 0, 8)], [Slice(0, 8, 16)]]) == 8, "the first half needs nothing of the second"


def test_whole_documents_stay_where_they_are() -> None:
    assert check([[Slice(0, 0, 5), Slice(2, 0, 1)], [Slice(1, 0, 7)], []]) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_every_schedule_can_be_exchanged(ranks: int) -> None:
    draw = random.Random(ranks)
    lengths = np.array([draw.choice([1, 2, 7, 30, 100, 200 * ranks // 3]) for _ in range(40)])
    planned = schedule(lengths, ranks=ranks, capacity=128, costs=COSTS)
    for micro_batch in planned.micro_batches:
        check([list(held) for held in micro_batch.slices])


def test_a_hole_is_an_error() -> None:
    with pytest.raises(ValueError, match="nobody holds token 2 of document 5"):
        plan_exchange([[Slice(5, 0, 2)], [Slice(5, 3, 6)]], 1)
