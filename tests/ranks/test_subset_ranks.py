"""Adapters of some experts, with those experts on ranks: each has the pairs of its own, and some have none."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from peft import PeftModel
from test_parity import demand_equality, make
from test_resharding import STEPS, assert_like, go_back_to, result, tokens_of_steps
from test_resharding import make as make_saving
from whole_runs import finish

NAMED = {
    "method__adapter__experts": {"layers": [{"layer": 1, "experts": [6, 1, 2]}, {"layer": 2, "experts": [5, 7]}]}
}  # fmt: skip
"""Of 8 experts on 2 ranks: two and one in layer 1, none and two in layer 2; on 4 ranks one, one, none and one."""
FIRST = {
    "method__adapter__experts": {"layers": [{"layer": 1, "experts": [0]}]},
    "method__adapter__targets": ["experts"],
}
MEASURED = {"method__adapter__experts": {"most_routed": 0.25, "documents": 20}}
PLACED = {"router__placement": "measured"}
NF4 = {"method__quantize": "nf4"}
DROPOUT = {"method__adapter__dropout": 0.1}

TWO = {
    "named ep2": ("qwen3_moe", NAMED, {"ep": 2}),
    "named ep2 recomputed": ("qwen3_moe", NAMED | {"train__checkpointing": "full"}, {"ep": 2}),
    "named ep2 zero3": ("qwen3_moe", NAMED, {"ep": 2, "dense": "zero3"}),
    "named ep2 placed": ("qwen3_moe", NAMED | PLACED, {"ep": 2}),
    "named ep2 nf4": ("qwen3_moe", NAMED | NF4, {"ep": 2, "dense": "zero3"}),
    "first ep2": ("gpt_oss", FIRST, {"ep": 2}),
    "measured ep2": ("qwen3_moe", MEASURED, {"ep": 2}),
}  # fmt: skip
FOUR = {
    "named ep4": ("qwen3_moe", NAMED, {"ep": 4}),
    "named ep2 zero2": ("qwen3_moe", NAMED, {"ep": 2, "dense": "zero2"}),
    "named ep2 placed zero2": ("qwen3_moe", NAMED | PLACED, {"ep": 2, "dense": "zero2"}),
    "named ep2 two copies": ("qwen3_moe", NAMED, {"ep": 2, "dense": "zero2", "dp_replicate": 2}),
    "measured ep4 zero3": ("qwen3_moe", MEASURED, {"ep": 4, "dense": "zero3"}),
}  # fmt: skip


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_ranks_with_some_adapted_experts_equal_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    demand_equality({name: make(tmp_path, name, *case) for name, case in cases.items()}, tmp_path, size=size)
