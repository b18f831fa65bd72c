"""adamw8bit on ranks: the blocks of one process where they are not cut, float32 where they are, and back again."""

from pathlib import Path

import pytest
from test_parity import FULL, demand_equality, make

pytest.importorskip("bitsandbytes")

EIGHT = {"train__optimizer": "adamw8bit"}
WIDE = {"method__adapter__rank": 160}
"""So that the factors of attention have 4,096 elements and more."""

TWO = {
    "moe full ep2": ("qwen3_moe", FULL | EIGHT, {"ep": 2}),
    "moe full zero2": ("qwen3_moe", FULL | EIGHT, {"dense": "zero2"}),
    "moe lora ep2": ("qwen3_moe", WIDE | EIGHT, {"ep": 2}),
    "moe lora zero2": ("qwen3_moe", WIDE | EIGHT, {"dense": "zero2"}),
}  # fmt: skip


@pytest.mark.parametrize(("size", "cases"), [(2, TWO)], ids=["2 ranks"])
def test_eight_bit_state_in_pieces_equals_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    demand_equality({name: make(tmp_path, name, *case) for name, case in cases.items()}, tmp_path, size=size)
