"""Attention over ranks equals attention on one: output and gradients, for documents cut in any way."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import Tensor

from gatewright.model.attention_slices import SliceAttention, attend_each_slice, bounds_of
from gatewright.packing.cost import CostModel
from gatewright.packing.exchange_cost import Name, aligned_size
from gatewright.packing.exchange_plan import plan
from gatewright.packing.schedule import Slice, schedule
from gatewright.parallel.context import Context
from gatewright.parallel.layout import Layout
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import Ranks, join_ranks
from gatewright.train.context import context_of

CPU = torch.device("cpu")
WIDTH, VALUE_WIDTH = 8, 6
COSTS = CostModel(token_s=1e-6, attention_s=1e-9, near_s=1e-9, far_s=1e-9, hop_s=1e-9, slot_s=1e-5, ranks_per_node=8)
Slices = list[list[Slice]]


def scheduled(ranks: int) -> list[Slices]:
    """The micro-batches of a real schedule: whole documents, and some that two or more ranks share."""
    lengths = np.array([90, 60, 33, 20, 7, 3, 1, 1])
    planned = schedule(lengths, ranks=ranks, capacity=40 if ranks > 2 else 60, costs=COSTS)
    return [[list(held) for held in micro_batch.slices] for micro_batch in planned.micro_batches]


UNALIGNED: Slices = [
    [Slice(0, 0, 5), Slice(0, 20, 23)],
    [Slice(1, 0, 9), Slice(0, 5, 9)],
    [Slice(2, 3, 8), Slice(0, 9, 20)],
    [Slice(2, 0, 3), Slice(2, 8, 11)],
]
"""Documents 0 and 2 over {0, 1, 2} and {2, 3}, at once; document 1 whole."""
ONE_WITHOUT_TOKENS: Slices = [[Slice(0, 0, 6)], []]
PAIRS: Slices = [
    [Slice(0, 0, 5), Slice(0, 20, 23)],
    [Slice(0, 5, 20), Slice(1, 0, 4)],
    [Slice(2, 0, 3), Slice(2, 8, 11), Slice(3, 0, 1)],
    [Slice(2, 3, 8)],
]
"""Documents 0 and 2 over the aligned pairs, unevenly; documents 1 and 3 whole."""
THIRD_WITHOUT_TOKENS: Slices = [[Slice(0, 0, 7), Slice(0, 25, 30)], [], [Slice(0, 7, 25)]]
EXCHANGES: tuple[Name, ...] = ("moved", "gathered", "heads", "ring")


def rows_of(held: list[Slice], document: dict[int, Tensor]) -> Tensor:
    """[rows, heads, width]: what a rank that holds these slices has of the documents."""
    parts = [document[piece.document][piece.start : piece.end] for piece in held]
    some = next(iter(document.values()))
    return torch.cat(parts) if parts else some[:0]


def documents(slices: Slices, heads: int, width: int, *, seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ends: dict[int, int] = {}
    for piece in (piece for held in slices for piece in held):
        ends[piece.document] = max(piece.end, ends.get(piece.document, 0))
    return {number: torch.randn(ends[number], heads, width, generator=generator) for number in sorted(ends)}


def head_counts(ranks: int) -> tuple[int, int]:
    """Query heads that the ranks divide, and fewer key/value heads, which they need not divide."""
    return {2: (4, 2), 3: (6, 2), 4: (12, 6)}[ranks]


def made(slices: Slices) -> tuple[dict[int, Tensor], ...]:
    """q, k, v and the gradient of the output, by document."""
    heads, key_heads = head_counts(len(slices))
    shapes = ((heads, WIDTH), (key_heads, WIDTH), (key_heads, VALUE_WIDTH), (heads, VALUE_WIDTH))
    return tuple(documents(slices, count, width, seed=seed) for seed, (count, width) in enumerate(shapes))


def on_one(slices: Slices, window: int | None) -> list[dict[int, Tensor]]:
    """Output and gradients of q, k, v, by document, each document whole."""
    q, k, v, grad = made(slices)
    found: list[dict[int, Tensor]] = [{}, {}, {}, {}]
    for number in q:
        leaves = [one[number].clone().requires_grad_() for one in (q, k, v)]
        heads_first = [leaf.transpose(0, 1)[None] for leaf in leaves]
        bounds = bounds_of([len(q[number])], [len(q[number])], CPU)
        out = attend_each_slice(*heads_first, bounds, 0.3, window)[0]
        out.backward(grad[number])
        for slot, tensor in enumerate([out.detach(), *(leaf.grad for leaf in leaves)]):
            assert tensor is not None
            found[slot][number] = tensor
    return found


def exchange_of(name: Name, slices: Slices, ranks: Ranks) -> Context | None:
    """The exchange over the smallest aligned groups, or over all ranks; None for a group that cuts nothing."""
    size = ranks.size if name == "moved" else aligned_size(slices)
    part = plan(slices, ranks.rank, (name, size))
    return None if part is None else context_of(part, ranks)


def on_this_rank(
    place: Place, many: list[Slices], window: int | None
) -> tuple[dict[Name, list[list[Tensor]]], list[int]]:
    """Output and gradients of each exchange and micro-batch; and how many process groups there were on the way."""
    torch.set_num_threads(1)
    results: dict[Name, list[list[Tensor]]] = {name: [] for name in EXCHANGES}
    groups = []
    with join_ranks(place, Layout(ranks=place.size, cuts=True), device=CPU, timeout_s=60) as ranks:
        for slices in many:
            held = slices[place.rank]
            for name in EXCHANGES:
                q, k, v, grad = (rows_of(held, one) for one in made(slices))
                leaves = [one.clone().requires_grad_() for one in (q, k, v)]
                heads_first = [leaf.transpose(0, 1)[None] for leaf in leaves]
                attend = SliceAttention(0.3, window, attend_each_slice, equal_widths=False)
                if (context := exchange_of(name, slices, ranks)) is None:
                    lengths = [piece.end for piece in held]
                    out = attend(*heads_first, bounds_of(lengths, lengths, CPU))[0]
                else:
                    out = context(*heads_first, attend)[0]
                out.backward(grad)
                results[name].append([out.detach(), *(leaf.grad for leaf in leaves)])
                groups.append(len(dist.distributed_c10d._world.pg_map))
    assert not dist.is_initialized() and not dist.distributed_c10d._world.pg_map, "destroyed with the rest"
    return results, groups


@pytest.mark.parametrize("window", [None, 9], ids=["full", "window"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slices_attend_as_whole_documents_do(tmp_path: Path, ranks: int, window: int | None) -> None:
    many = scheduled(ranks)
    assert any(piece.start for slices in many for held in slices for piece in held), "some are cut"
    many += {2: [ONE_WITHOUT_TOKENS], 3: [THIRD_WITHOUT_TOKENS], 4: [UNALIGNED, PAIRS]}[ranks]
    every = on_ranks(ranks, tmp_path / "ranks", on_this_rank, many, window)
    for _, groups in every:
        assert len(set(groups)) == 1, f"groups are made on the way: {groups}"
    for number, slices in enumerate(many):
        wanted = on_one(slices, window)
        for rank, held in enumerate(slices):
            for name in EXCHANGES:
                for got, want in zip(every[rank][0][name][number], wanted, strict=True):
                    expected = rows_of(held, want)
                    torch.testing.assert_close(
                        got, expected, atol=2e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
                    )


def sizes_on_this_rank(place: Place) -> dict[int, list[int]]:
    with join_ranks(place, Layout(ranks=place.size, cuts=True), device=CPU, timeout_s=60) as ranks:
        assert ranks.pool is not None
        return {size: dist.get_process_group_ranks(ranks.pool.of(size)) for size in ranks.pool.sizes}


def test_the_pool_has_an_aligned_group_of_each_size(tmp_path: Path) -> None:
    found = on_ranks(4, tmp_path / "ranks", sizes_on_this_rank)
    assert found[0] == found[1] == {2: [0, 1], 4: [0, 1, 2, 3]}
    assert found[2] == found[3] == {2: [2, 3], 4: [0, 1, 2, 3]}
