"""adamw8bit on ranks: one process's blocks where none is cut, float32 where one is; checkpoints move between layouts.

Gradients of ranks differ from one process's by the rounding of sums. Now and then that decides to which code a moment
is rounded, so here not all can be equal to 1e-5; with the same gradients, it is to the bit (tests/metal).
"""

from pathlib import Path

import pytest
import torch
from processes import free_ports, on_ranks
from steps import alone
from test_parity import FULL, demand_equality, differences, make, take_all
from test_resharding import go_on_in_the_same_layout, go_through, result

from gatewright.spec.eight_bit import BLOCK_8BIT

pytest.importorskip("bitsandbytes")

EIGHT = {"train__optimizer": "adamw8bit"}
WIDE = {"method__adapter__rank": 160}
"""So that the factors of attention have 4,096 elements and more."""
PLACED = {"router__placement": "measured"}

TWO = {
    "full ep2": ("qwen3_moe", FULL | EIGHT, {"ep": 2}),
    "full zero2": ("qwen3_moe", FULL | EIGHT, {"dense": "zero2"}),
    "full zero3 ep2": ("qwen3_moe", FULL | EIGHT, {"ep": 2, "dense": "zero3"}),
    "lora ep2 placed": ("qwen3_moe", WIDE | EIGHT | PLACED, {"ep": 2}),
    "lora zero2": ("qwen3_moe", WIDE | EIGHT, {"dense": "zero2"}),
}  # fmt: skip
FOUR = {
    "lora ep2 zero2": ("qwen3_moe", WIDE | EIGHT, {"ep": 2, "dense": "zero2"}),
    "lora ep2 zero3": ("qwen3_moe", WIDE | EIGHT, {"ep": 2, "dense": "zero3"}),
    "full ep2 zero2": ("qwen3_moe", FULL | EIGHT, {"ep": 2, "dense": "zero2"}),
}  # fmt: skip


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_ranks_with_eight_bit_state_equal_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    """A moment that is rounded to another code shows most in a factor that began at zero: up to 1e-4 was measured."""
    runs = {name: make(tmp_path, name, *case) for name, case in cases.items()}
    demand_equality(runs, tmp_path, size=size, weights=1e-3)


def test_moments_of_a_weight_that_is_cut_inside_a_block_are_float32(tmp_path: Path) -> None:
    """Four ranks have 68 rows each of an embedding 32 wide: what they come to is what one process does with adamw."""
    one = alone(make(tmp_path, "one", "llama", FULL | {"method__roles": ["embedding"]}, {}))
    run = make(tmp_path, "four", "llama", FULL | EIGHT | {"method__roles": ["embedding"]}, {"dense": "zero3"})
    many = on_ranks(4, tmp_path / "ranks", take_all, {"four": run}, free_ports(1), 3)
    assert not differences(one, [part["four"] for part in many])


def moments(run_result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By weight and moment, in float32."""
    found = {}
    for key, tensor in run_result.items():
        name, _, kind = key.rpartition("/")
        if kind in ("state1", "state2") and tensor.dtype == torch.uint8:
            scales = run_result[f"{name}/absmax{kind[-1]}"].repeat_interleave(BLOCK_8BIT)[: tensor.numel()]
            tensor = run_result[f"optimizer/qmap{kind[-1]}"][tensor.long()] * scales.view_as(tensor)
        if kind in ("state1", "state2"):
            found[key] = tensor
    return found


def relative_errors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    assert set(one) == set(other)
    return {name: float((other[name] - one[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one}


def test_eight_bit_state_moves_between_layouts(tmp_path: Path) -> None:
    """Two steps each on 4, 2, 1 and 4 ranks, which cut blocks of embedding and head; beside it, one process alone."""
    one, other = map(result, go_through(tmp_path, **EIGHT | FULL))
    cut = ("model.embed_tokens.weight", "lm_head.weight")
    assert {key.split("/")[1] for key in set(one) ^ set(other)} == set(cut), "float32 on four ranks"
    # What is not cut: 1e-4 was measured, a code more or less here and there.
    for name, error in relative_errors(moments(one), moments(other)).items():
        assert error < (0.05 if name.split("/")[1] in cut else 2e-3), (name, error)
    weights = [{k: v for k, v in found.items() if not k.startswith("optimizer/")} for found in (one, other)]
    assert max(relative_errors(*weights).values()) < 1e-3


def test_the_same_layout_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    go_on_in_the_same_layout(tmp_path, **EIGHT | WIDE)
