"""Adapters of some experts, with those experts on ranks: each has the pairs of its own, and some have none."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from peft import PeftModel
from test_parity import demand_equality, make
from test_resharding import STEPS, assert_like, go_back_to, go_through, result
from test_resharding import make as make_saving
from whole_runs import finish

from gatewright.train.choose_experts import FILE

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
    "named ep2 zero3": ("qwen3_moe", NAMED, {"ep": 2, "dense": "zero3"}),
    "named ep2 zero3 placed": ("qwen3_moe", NAMED | PLACED, {"ep": 2, "dense": "zero3"}),
    "named ep2 zero3 nf4": ("qwen3_moe", NAMED | NF4, {"ep": 2, "dense": "zero3"}),
    "named ep2 placed zero2": ("qwen3_moe", NAMED | PLACED, {"ep": 2, "dense": "zero2"}),
    "named ep2 two copies": ("qwen3_moe", NAMED, {"ep": 2, "dense": "zero2", "dp_replicate": 2}),
    "measured ep4 zero3": ("qwen3_moe", MEASURED, {"ep": 4, "dense": "zero3"}),
}  # fmt: skip


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_ranks_with_some_adapted_experts_equal_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    demand_equality({name: make(tmp_path, name, *case) for name, case in cases.items()}, tmp_path, size=size)


CHAIN = [(4, {"ep": 2, "dense": "zero3"}), (1, {}), (4, {"ep": 4}), (4, {"ep": 2, "dense": "zero3"} | PLACED)]


def test_a_run_of_some_adapted_experts_moves_between_layouts(tmp_path: Path) -> None:
    """Two steps each on 4, 1, 4 and 4 ranks, the last time dealt otherwise; beside it, one process alone.

    Stock PEFT loads what both saved, and answers alike.
    """
    straight, run = go_through(tmp_path, CHAIN, **NAMED)
    assert_like(result(straight), result(run))
    notes = [json.loads((done.folder / "adapter" / "gatewright.json").read_text()) for done in (straight, run)]
    assert notes[0]["experts"] == notes[1]["experts"] == {
        "model.layers.1.mlp.experts": [1, 2, 6], "model.layers.2.mlp.experts": [5, 7]
    }  # fmt: skip
    coverage = [json.loads((done.folder / "coverage.json").read_text()) for done in (straight, run)]
    assert coverage[0] == coverage[1]
    tokens = torch.arange(40).view(1, -1)
    base = tiny.load_plain(tmp_path / "base-qwen3_moe")
    with torch.no_grad():
        plain = base(tokens).logits
        ours, theirs = (
            PeftModel.from_pretrained(tiny.load_plain(tmp_path / "base-qwen3_moe"), done.folder / "adapter")(tokens)
            for done in (run, straight)
        )
    assert (ours.logits - plain).abs().max() > 1e-2
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)


def test_ranks_take_the_choice_that_the_run_folder_keeps(tmp_path: Path) -> None:
    """Measured on two ranks, each counting all; taken up by one process; begun from an adapter that it made."""
    run = make_saving(tmp_path, "measured", {"ep": 2}, **MEASURED)
    finish(run, 2)
    kept = (run.folder / FILE).read_bytes()
    assert all(len(experts) == 2 for experts in json.loads(kept)["layers"].values())
    go_back_to(run, STEPS // 2)
    alone = make_saving(tmp_path, "measured", {}, **MEASURED)
    finish(alone, 1)
    assert (run.folder / FILE).read_bytes() == kept

    layers = [{"layer": int(layer), "experts": experts} for layer, experts in json.loads(kept)["layers"].items()]
    begun = {"method__adapter__start": str(run.folder / "adapter"), "method__adapter__experts": {"layers": layers}}
    second = make_saving(tmp_path, "second", {"ep": 2}, **begun)
    finish(second, 2)
    losses = [[event["loss"] for event in tiny.events(done, "step")] for done in (run, second)]
    assert losses[1][0] < losses[0][0]
