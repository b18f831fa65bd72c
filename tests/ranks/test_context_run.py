"""Training with documents cut over ranks equals training in one process: loss, gradients, norm, weights, counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from processes import free_ports, on_ranks
from steps import Taken, take_steps
from test_parity import ROUTER, differences

from gatewright.parallel.place import ALONE, Place
from gatewright.spec.run import Run

FULL = {"method__adapter": None}
TWO = {
    "dense lora": ("llama", {}, {"cp": "dynamic"}),
    "dense full zero2": ("llama-tied", FULL, {"cp": "dynamic", "dense": "zero2"}),
    "dense full zero3": ("llama", FULL, {"cp": "dynamic", "dense": "zero3"}),
    "moe lora ep2": ("qwen3_moe", {}, {"cp": "dynamic", "ep": 2}),
    "moe lora recomputed": ("qwen3_moe", {"train__checkpointing": "full"}, {"cp": "dynamic"}),
    "moe router losses": ("qwen3_moe", ROUTER, {"cp": "dynamic", "ep": 2}),
    "static": ("mixtral", {}, {"cp": 2}),
    "gathered": ("qwen3_moe", {}, {"cp": "dynamic", "exchange": "gathered"}),
    "heads": ("qwen3_moe", {"train__checkpointing": "full"}, {"cp": "dynamic", "exchange": "heads"}),
    "ring": ("llama", FULL, {"cp": 2, "exchange": "ring", "dense": "zero3"}),
}
THREE = {"odd ranks": ("qwen3_moe", {}, {"cp": "dynamic"}), "static of three": ("llama", {}, {"cp": 3})}
FOUR = {
    "moe full ep2 zero3": ("qwen3_moe", FULL, {"cp": "dynamic", "ep": 2, "dense": "zero3"}),
    "moe lora ep4": ("qwen3_moe", {}, {"cp": "dynamic", "ep": 4}),
    "static of four": ("qwen3_moe", {}, {"cp": 2, "dense": "zero2"}),
}


def make(folder: Path, name: str, kind: str, changes: dict[str, object], parallel: dict[str, object]) -> Run:
    """A run whose ranks hold 30 to 60 tokens at a time, of documents of up to 80."""
    values = {"train__tokens_per_step": 400, "train__lr": 1e-3, "train__weight_decay": 0.1, "train__clip_norm": 0.5}
    # Sums are made in another order: an update by the sign of a gradient that is all rounding must not be told apart.
    values |= {"train__micro_batch_tokens": 45, "train__eps": 1e-4}
    layout = {f"parallel__{key}": value for key, value in parallel.items()}
    return tiny.make_run(folder, kind, run=name.replace(" ", "-"), **values | changes | layout)


def alone(run: Run) -> Taken:
    """One process that holds the whole step at once."""
    train = run.train.model_copy(update={"micro_batch_tokens": run.train.tokens_per_step})
    parallel = run.parallel.model_copy(update={"cp": "dynamic", "ep": 1, "dense": "replicate"})
    return take_steps(ALONE, run.model_copy(update={"train": train, "parallel": parallel}))


def take_all(place: Place, runs: dict[str, Run], ports: list[int]) -> dict[str, Taken]:
    return {
        name: take_steps(replace(place, port=port), run) for (name, run), port in zip(runs.items(), ports, strict=True)
    }


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (3, THREE), (4, FOUR)], ids=["2 ranks", "3 ranks", "4 ranks"])
def test_cut_documents_train_as_whole_ones(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    runs = {name: make(tmp_path, name, *case) for name, case in cases.items()}
    one = {name: alone(run) for name, run in runs.items()}
    many = on_ranks(size, tmp_path / "ranks", take_all, runs, free_ports(len(runs)), patience_s=200)
    faults = []
    for name in runs:
        faults += [f"{name}: {fault}" for fault in differences(one[name], [part[name] for part in many])]
    assert not faults, "\n".join(faults)
