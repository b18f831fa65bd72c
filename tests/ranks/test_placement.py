"""Experts on ranks by measured loads: as if they lay in order, in every number, count and file."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_parity import ROUTER, demand_equality, make
from test_resharding import STEPS, assert_like, go_back_to, result, tokens_of_steps
from test_resharding import make as make_saving
from whole_runs import finish

from gatewright.router.placement import place
from gatewright.spec.errors import RunFileError
from gatewright.spec.run import Run
from gatewright.train.setup import set_up

MEASURED = {"router__placement": "measured"}
FULL = {"method__adapter": None}
NF4 = {"method__quantize": "nf4"}

TWO = {
    "lora ep2": ("qwen3_moe", {}, {"ep": 2}),
    "lora zero3 ep2": ("qwen3_moe", {}, {"ep": 2, "dense": "zero3"}),
    "full zero3 ep2": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero3"}),
    "full ep2, router losses": ("qwen3_moe", ROUTER, {"ep": 2}),
    "nf4 ep2": ("qwen3_moe", NF4, {"ep": 2}),
    "nf4 zero3 ep2": ("qwen3_moe", NF4, {"ep": 2, "dense": "zero3"}),
    "capacity": ("qwen3_moe", {"router__capacity": 1.0}, {"ep": 2}),
}  # fmt: skip
FOUR = {
    "lora ep4": ("qwen3_moe", {"train__checkpointing": "full"}, {"ep": 4}),
    "lora ep2 zero2": ("qwen3_moe", {}, {"ep": 2, "dense": "zero2"}),
    "nf4 ep2 zero3": ("qwen3_moe", NF4, {"ep": 2, "dense": "zero3"}),
    "full ep2 zero2": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero2"}),
    "full ep2 zero2 two copies": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero2", "dp_replicate": 2}),
    "full ep2 zero3": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero3"}),
    "full ep2 zero3 two copies": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero3", "dp_replicate": 2}),
}  # fmt: skip


def skew(folder: Path) -> None:
    """A base whose first experts are the popular ones, so that in their own order they crowd one rank."""
    tiny.make_run(folder, "qwen3_moe")
    file = folder / "base-qwen3_moe" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor *= torch.linspace(3.0, 0.5, 8)[:, None]
        if name.endswith("layers.2.mlp.gate.weight"):
            tensors[name] = tensor[[3, 7, 4, 6, 5, 2, 0, 1]]  # by the loads that the scaling gave
    save_file(tensors, file, {"format": "pt"})


def orders(run: Run, ep: int) -> list[list[int]]:
    loads = json.loads((run.folder / "placement.json").read_text())["loads"]
    return place([loads[layer] for layer in sorted(loads, key=int)], ep=ep).order


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_placed_ranks_equal_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    skew(tmp_path)
    runs = {}
    for name, (kind, changes, layout) in cases.items():
        runs[name] = make(tmp_path, name, kind, changes | MEASURED, layout)
        runs[name].folder.mkdir(parents=True)
    demand_equality(runs, tmp_path, size=size)
    for name, run in runs.items():
        for order in orders(run, run.parallel.ep):
            assert order != sorted(order), f"{name}: a layer is not moved"


CHAIN = [
    (4, "measured", {"ep": 4}),
    (1, "contiguous", {}),
    (2, "measured", {"ep": 2, "dense": "zero3"}),
    (4, "measured", {"ep": 2, "dense": "zero2"}),
]


@pytest.mark.parametrize("changes", [{}, FULL], ids=["lora", "full"])
def test_a_placed_run_moves_between_layouts(tmp_path: Path, changes: dict[str, object]) -> None:
    """Two steps each on 4, 1, 2 and 4 ranks; beside it, the run on one process alone."""
    skew(tmp_path)
    straight = make_saving(tmp_path, "straight", {}, **changes)
    finish(straight, 1)
    for number, (size, placement, layout) in enumerate(CHAIN):
        run = make_saving(tmp_path, "moved", layout, router__placement=placement, **changes)
        finish(run, size)
        if number == 0:
            measured = (run.folder / "placement.json").read_bytes()
        if number < len(CHAIN) - 1:
            go_back_to(run, 2 * (number + 1))
    assert [event["resumed_step"] for event in tiny.events(run, "start")] == [None, 2, 4, 6]
    assert len(tiny.events(run, "resume")) == 3
    assert (run.folder / "placement.json").read_bytes() == measured
    assert tokens_of_steps(run) == tokens_of_steps(straight)
    assert_like(result(straight), result(run))
    notes = [event["text"] for event in tiny.events(run, "finding") if "router.placement" in event["text"]]
    assert len(notes) == 3
    for note in notes:
        before, after = note.partition("layers: ")[2].removesuffix(" times the fair load").split(" → ")
        assert float(after) < float(before) - 0.05, note


def test_the_adapter_is_that_of_the_run_in_order(tmp_path: Path) -> None:
    """Also in stock PEFT; and a resume on the same ranks goes on to the same bits."""
    skew(tmp_path)
    layout = {"ep": 2}
    placed = make_saving(tmp_path, "placed", layout, **MEASURED)
    contiguous = make_saving(tmp_path, "contiguous", layout)
    finish(placed, 2)
    finish(contiguous, 2)
    assert tokens_of_steps(placed) == tokens_of_steps(contiguous)
    assert_like(result(contiguous), result(placed))
    tokens = torch.arange(40).view(1, -1)
    with torch.no_grad():
        base = tiny.load_plain(tmp_path / "base-qwen3_moe")(tokens).logits
        ours, theirs = (
            PeftModel.from_pretrained(tiny.load_plain(tmp_path / "base-qwen3_moe"), run.folder / "adapter")(tokens)
            for run in (placed, contiguous)
        )
    assert (ours.logits - base).abs().max() > 1e-2
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)

    adapter = placed.folder / "adapter" / "adapter_model.safetensors"
    bits = adapter.read_bytes()
    go_back_to(placed, STEPS // 2)
    shutil.rmtree(placed.folder / "adapter", ignore_errors=True)
    finish(placed, 2)
    assert adapter.read_bytes() == bits


def test_a_dense_model_refuses_it_and_one_rank_says_it_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"router\.placement: LlamaForCausalLM is a dense model"):
        set_up(tiny.make_run(tmp_path, "llama", **MEASURED), log=lambda event: None)
    said = []
    set_up(tiny.make_run(tmp_path, "mixtral", **MEASURED), log=said.append)
    assert any("router.placement: measured changes nothing" in str(event) for event in said)


def test_capacity_of_a_rank_is_that_of_the_experts_it_holds(tmp_path: Path) -> None:
    """Spread experts fill the ranks' buffers evenly: less is dropped than with the popular ones on one rank."""
    skew(tmp_path)
    dropped = {}
    for name, changes in (("contiguous", {}), ("placed", MEASURED)):
        run = make_saving(tmp_path, name, {"ep": 2}, router__capacity=1.1, router__capacity_per="rank", **changes)
        finish(run, 2)
        dropped[name] = sum(event["dropped_tokens"] for event in tiny.events(run, "step"))
    assert dropped["placed"] < 0.7 * dropped["contiguous"]
