"""AdamW with its moments in 8 bits, by bitsandbytes, where ranks divide what it updates.

bitsandbytes 0.50 counts blocks of 256 elements from the first of the tensor that it is given, on CPUs and GPUs alike.
A block of a moment is 256 codes of one byte and one float32 scale, and no block depends on another. So a rank that is
given a piece which begins at a multiple of 256 has, to the bit, those blocks of the whole tensor: its state is a part
of one process's. Where a layout cuts a tensor elsewhere, its moments stay in float32 on all ranks, as bitsandbytes
keeps those of small tensors. Taken up in another layout, float32 moments are rounded to codes once, and codes become
the numbers that they stand for.
"""

import importlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gatewright.parallel.gradients import Share
from gatewright.parallel.pieces import Part, Piece
from gatewright.spec import run as spec
from gatewright.spec.eight_bit import BLOCK_8BIT, SMALL_8BIT
from gatewright.spec.errors import UserError
from gatewright.spec.event import Finding
from gatewright.train.pieces import SavedState

IN_BLOCKS = "in_blocks"
"""Key of a parameter group: whether its moments are in 8 bits."""
MOMENTS = (1, 2)
"""Ends of the keys state, absmax (scales) and qmap (what codes stand for) in bitsandbytes' state of a parameter."""


def in_blocks(piece: Piece) -> bool:
    """Whether the moments of a weight are in 8 bits: it is not small, and no rank has a part of a block."""
    return math.prod(piece.shape) >= SMALL_8BIT and piece.grain % BLOCK_8BIT == 0


def left_in_float32(pieces: Iterable[Piece]) -> Finding | None:
    """What the user should know of weights that are not small, and whose moments are not in 8 bits all the same."""
    sizes = [(math.prod(piece.shape), in_blocks(piece)) for piece in pieces]
    cut = [size for size, blocks in sizes if size >= SMALL_8BIT and not blocks]
    if not cut:
        return None
    text = (
        f"train.optimizer: adamw8bit keeps float32 moments of {len(cut)} weights with {sum(cut):,} of "
        f"{sum(size for size, _ in sizes):,} parameters: this layout cuts them inside a block of {BLOCK_8BIT}"
    )
    return Finding(severity="note", text=text)


def adamw_8bit(groups: list[dict[str, Any]], train: spec.Train) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, which keeps the moments of each group as IN_BLOCKS says. Raises UserError without it."""
    try:
        bitsandbytes = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f'train.optimizer: adamw8bit needs bitsandbytes ({error}); pip install "gatewright[quantize]"'
        ) from None

    theirs: Any = bitsandbytes.optim.AdamW8bit

    class AdamW8bit(theirs):
        """By itself it would judge by the size of a rank's piece, not of the weight."""

        def get_config(self, group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
            bits = 8 if group[IN_BLOCKS] else 32
            return super().get_config(group_index, index, group) | {"optim_bits": bits, "min_8bit_size": 0}

    return AdamW8bit(groups, lr=train.lr, betas=train.betas, eps=train.eps)


def codes_of(optimizer: Any) -> dict[str, Tensor]:
    """What the 256 codes of each moment stand for, float32 [256]."""
    return {"qmap1": optimizer.name2qmap["dynamic"], "qmap2": optimizer.name2qmap["udynamic"]}


def give_codes(optimizer: torch.optim.Optimizer, codes: Mapping[str, Tensor]) -> None:
    """Completes a state that was taken up: every moment in 8 bits has one tensor of codes with the others."""
    for state in optimizer.state.values():
        if "absmax1" in state:
            state |= codes


def part_of_state(share: Share, key: str) -> Part:
    """What a tensor of the state of a rank's piece is of that of the whole weight; scales are one for each block."""
    part = share.piece.part
    return part.in_blocks(BLOCK_8BIT) if key.startswith("absmax") else part


def read_moments(saved: SavedState, prefix: str, share: Share, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a rank's piece of a weight as this layout keeps it, whichever layout saved it; empty where none did.

    `prefix`: of the weight's state in the files.
    """
    keys, part = saved.keys(prefix), share.piece.part
    if not keys:
        return {}
    state = {"step": saved.read(f"{prefix}step", part)}
    for n in MOMENTS:
        values = saved.read(f"{prefix}state{n}", part)
        if f"absmax{n}" in keys:
            scales = saved.read(f"{prefix}absmax{n}", part.in_blocks(BLOCK_8BIT))
            if in_blocks(share.piece):
                state[f"absmax{n}"] = scales
            else:
                values = codes[f"qmap{n}"].cpu()[values.long()] * scales[_block_of_each(part)]
        elif in_blocks(share.piece):
            values, state[f"absmax{n}"] = _rounded(values, codes[f"qmap{n}"].cpu())
        state[f"state{n}"] = values.view_as(share.owned)
    return state


def _block_of_each(part: Part) -> Tensor:
    """Of each element, which of the blocks of `part.in_blocks` has it."""
    found, before = [torch.empty(0, dtype=torch.int64)], 0
    for (begin, end), (first, last) in zip(part.runs, part.in_blocks(BLOCK_8BIT).runs, strict=True):
        found.append(torch.arange(begin, end) // BLOCK_8BIT - first + before)
        before += last - first
    return torch.cat(found)


def _rounded(values: Tensor, code_Q: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of float32 values, as bitsandbytes makes them after a step."""
    functional = importlib.import_module("bitsandbytes.functional")
    codes, quantized = functional.quantize_blockwise(values, code=code_Q, blocksize=BLOCK_8BIT)
    return codes, quantized.absmax
