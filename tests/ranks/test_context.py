"""Attention over ranks equals attention on one: output and gradients, for documents cut in any way."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import Tensor

from gatewright.model.attention_slices import attend_slices
from gatewright.packing.cost import CostModel
from gatewright.packing.exchange import plan_exchange
from gatewright.packing.schedule import Slice, schedule
from gatewright.parallel.context import Moved
from gatewright.parallel.place import Place

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
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


def made(slices: Slices) -> tuple[dict[int, Tensor], ...]:
    """q, k, v and the gradient of the output, by document."""
    shapes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, VALUE_WIDTH), (HEADS, VALUE_WIDTH))
    return tuple(documents(slices, heads, width, seed=seed) for seed, (heads, width) in enumerate(shapes))


def on_one(slices: Slices, window: int | None) -> list[dict[int, Tensor]]:
    """Output and gradients of q, k, v, by document, each document whole."""
    q, k, v, grad = made(slices)
    found: list[dict[int, Tensor]] = [{}, {}, {}, {}]
    for number in q:
        leaves = [one[number].clone().requires_grad_() for one in (q, k, v)]
        heads_first = [leaf.transpose(0, 1)[None] for leaf in leaves]
        length = [len(q[number])]
        out = attend_slices(*heads_first, length, length, scale=0.3, window=window)[0]
        out.backward(grad[number])
        for slot, tensor in enumerate([out.detach(), *(leaf.grad for leaf in leaves)]):
            assert tensor is not None
            found[slot][number] = tensor
    return found


def on_this_rank(place: Place, many: list[Slices], window: int | None) -> list[list[Tensor]]:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{place.address}:{place.port}", rank=place.rank, world_size=place.size
    )
    results = []
    for slices in many:
        held = slices[place.rank]
        q, k, v, grad = (rows_of(held, one) for one in made(slices))
        leaves = [one.clone().requires_grad_() for one in (q, k, v)]
        moved = Moved(plan_exchange(slices, place.rank), dist.group.WORLD, device=torch.device("cpu"))
        heads_first = [leaf.transpose(0, 1)[None] for leaf in leaves]
        out = moved(*heads_first, lambda *rows: attend_slices(*rows, scale=0.3, window=window))[0]
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    groups = len(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    assert groups == 1, "no group is made on the way"
    return results


@pytest.mark.parametrize("window", [None, 9], ids=["full", "window"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slices_attend_as_whole_documents_do(tmp_path: Path, ranks: int, window: int | None) -> None:
    many = scheduled(ranks)
    assert any(piece.start for slices in many for held in slices for piece in held), "some are cut"
    many += {2: [ONE_WITHOUT_TOKENS], 3: [], 4: [UNALIGNED]}[ranks]
    every = on_ranks(ranks, tmp_path / "ranks", on_this_rank, many, window)
    for number, slices in enumerate(many):
        wanted = on_one(slices, window)
        for rank, held in enumerate(slices):
            for got, want in zip(every[rank][number], wanted, strict=True):
                expected = rows_of(held, want)
                torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)
