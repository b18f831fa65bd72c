"""Moments in 8 bits: a piece cut between blocks is a part of the whole, to the bit; layouts take up each other's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gatewright.parallel.gradients import Share
from gatewright.parallel.pieces import Piece
from gatewright.spec.run import Train
from gatewright.train.eight_bit import codes_of, in_blocks, left_in_float32, read_moments
from gatewright.train.optim import build_optimizer, optimizer_tensors
from gatewright.train.pieces import SavedState, write_pieces

functional = pytest.importorskip("bitsandbytes").functional

TRAIN = Train(tokens_per_step=1, steps=9, lr=1e-2, weight_decay=0.1, optimizer="adamw8bit")
ROWS, ROW = 12, 512
WHOLE = Piece(shape=(ROWS, ROW), begin=0, end=ROWS * ROW)
ON_GRID = [replace(WHOLE, begin=b * 256, end=e * 256, grain=256) for b, e in ((0, 1), (1, 17), (17, 24), (24, 24))]
BY_ROWS = [  # as experts lie that are dealt in another order
    replace(WHOLE, begin=0, end=5 * ROW, order=(7, 3, 11, 0, 1, 2, 4, 5, 6, 8, 9, 10), grain=ROW),
    replace(WHOLE, begin=5 * ROW, end=12 * ROW, order=(7, 3, 11, 0, 1, 2, 4, 5, 6, 8, 9, 10), grain=ROW),
]
OFF_GRID = [replace(WHOLE, begin=b, end=e, grain=100) for b, e in ((0, 1300), (1300, 5000), (5000, 6144))]


def elements(piece: Piece) -> Tensor:
    runs = [torch.arange(begin, end) for begin, end in piece.part.runs]
    return torch.cat(runs) if runs else torch.arange(0)


def as_held(flat: Tensor, piece: Piece) -> Tensor:
    return flat.view(piece.shape) if piece.part.whole else flat


def steps(pieces: list[Piece], *, count: int = 4) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """The same weight and the same gradients, by pieces."""
    draw = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(ROWS * ROW, generator=draw) for _ in range(count + 1))
    owned = [nn.Parameter(as_held(weight[elements(piece)], piece)) for piece in pieces]
    names = {str(number): p for number, p in enumerate(owned)}
    optimizer = build_optimizer(names, TRAIN, pieces=dict(zip(names, pieces, strict=True)))
    for grad in grads:
        for parameter, piece in zip(owned, pieces, strict=True):
            mine = grad[elements(piece)]
            parameter.grad = as_held(mine * mine.abs(), piece)
        optimizer.step()
    return owned, optimizer


def put_together(pieces: list[Piece], tensors: list[Tensor]) -> Tensor:
    whole = torch.empty(ROWS * ROW, dtype=tensors[0].dtype)
    for piece, tensor in zip(pieces, tensors, strict=True):
        whole[elements(piece)] = tensor.detach().view(-1)
    return whole


@pytest.mark.parametrize("pieces", [ON_GRID, BY_ROWS], ids=["runs of blocks", "rows in another order"])
def test_pieces_between_blocks_are_one_process_to_the_bit(pieces: list[Piece]) -> None:
    """Also a piece of one block, which by itself would be small."""
    assert all(map(in_blocks, pieces)) and left_in_float32(pieces) is None
    [whole], one = steps([WHOLE])
    owned, many = steps(pieces)
    assert torch.equal(put_together(pieces, owned), whole.view(-1))
    state = one.state[whole]
    for key in ("state1", "state2"):
        parts = [many.state[p][key] if p.numel() else torch.empty(0, dtype=torch.uint8) for p in owned]
        assert state[key].dtype == torch.uint8 and torch.equal(put_together(pieces, parts), state[key].view(-1))


def test_what_is_cut_inside_a_block_stays_in_float32_and_is_said() -> None:
    owned, optimizer = steps(OFF_GRID)
    assert {optimizer.state[p]["state1"].dtype for p in owned} == {torch.float32}
    small = Piece(shape=(4095,), begin=0, end=4095)
    found = left_in_float32([OFF_GRID[0], WHOLE, small])
    assert found is not None and "moments of 1 weights with 6,144 of 16,383 parameters" in found.text
    plain = build_optimizer({"w": nn.Parameter(torch.zeros(4095))}, TRAIN)
    assert not plain.param_groups[0]["in_blocks"]


def values(pieces: list[Piece], states: list[dict[str, Tensor]], n: int, code_Q: Tensor) -> Tensor:
    """A moment of the whole tensor in float32."""
    parts = []
    for state in states:
        moment = state.get(f"state{n}", torch.empty(0))
        if f"absmax{n}" in state:
            moment = functional.dequantize_blockwise(moment, absmax=state[f"absmax{n}"], code=code_Q, blocksize=256)
        parts.append(moment.view(-1))
    return put_together(pieces, parts)


DEALT = [replace(BY_ROWS[0], end=WHOLE.end)]
"""All on one rank, yet not in the tensor's own order."""
LAYOUTS = {"one": [WHOLE], "on grid": ON_GRID, "by rows": BY_ROWS, "dealt": DEALT, "off grid": OFF_GRID}


@pytest.mark.parametrize("then", LAYOUTS)
@pytest.mark.parametrize("now", LAYOUTS)
def test_any_layout_takes_up_any_others_state(tmp_path: Path, then: str, now: str) -> None:
    """Blocks as they are, codes as the numbers that they stand for, and float32 rounded as bitsandbytes rounds it."""
    pieces = LAYOUTS[then]
    owned, optimizer = steps(pieces)
    codes = codes_of(optimizer)
    for rank, (parameter, piece) in enumerate(zip(owned, pieces, strict=True)):
        state = optimizer_tensors(optimizer, {"w": parameter})
        parts = {key: piece.part for key in state if "state" in key}
        parts |= {key: piece.part.in_blocks(256) for key in state if "absmax" in key}
        write_pieces(tmp_path, state, parts=parts, rank=rank, ranks=len(pieces))
    saved = SavedState(tmp_path)
    found = []
    for piece in LAYOUTS[now]:
        parameter = nn.Parameter(as_held(torch.zeros(piece.elements), piece))
        share = Share(name="w", weight=parameter, owned=parameter, piece=piece)
        found.append(read_moments(saved, "w/", share, codes))
        assert found[-1]["step"] == 4
    for n in (1, 2):
        code_Q = codes[f"qmap{n}"]
        kept = values(pieces, [optimizer.state.get(p, {}) for p in owned], n, code_Q)
        got = values(LAYOUTS[now], found, n, code_Q)
        if then == "off grid" and now != "off grid":
            kept, quantized = functional.quantize_blockwise(kept, code=code_Q, blocksize=256)
            kept = functional.dequantize_blockwise(kept, quantized)
        assert torch.equal(got, kept)


def test_a_rank_may_have_nothing_to_update() -> None:
    empty = nn.Parameter(torch.empty(0))
    for name in ("adamw", "adamw8bit"):
        train = TRAIN.model_copy(update={"optimizer": name})
        optimizer = build_optimizer({"w": empty}, train, pieces={"w": ON_GRID[3]})
        optimizer.step()
        assert not optimizer.state
