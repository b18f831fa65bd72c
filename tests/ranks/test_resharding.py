"""Checkpoints written on some ranks and taken up on others: the same stream of tokens, and the same weights."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file
from whole_runs import finish

from gatewright.spec.run import Run
from gatewright.train.pieces import SavedState

STEPS = 8


def make(folder: Path, name: str, layout: dict[str, object], **changes: object) -> Run:
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    return tiny.make_run(
        folder, "qwen3_moe", run=name, train__steps=STEPS, train__save_every_steps=2, train__keep_checkpoints=10,
        train__micro_batch_tokens=100, train__lr=1e-3, **changes, **parallel,
    )  # fmt: skip


def go_back_to(run: Run, step: int) -> None:
    """As if the run had been ended after `step`."""
    for path in (run.folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    for output in ("adapter", "model"):
        shutil.rmtree(run.folder / output, ignore_errors=True)


def result(run: Run) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's state as one process would have it."""
    output = run.folder / ("adapter" if run.method.adapter else "model")
    [file] = output.glob("*model.safetensors")
    saved = SavedState(run.folder / "checkpoints" / f"step-{STEPS:08d}")
    return load_file(file) | saved.common("optimizer/")


def tokens_of_steps(run: Run) -> dict[int, tuple[int, int, list[list[int]]]]:
    return {e["step"]: (e["tokens"], e["target_tokens"], e["expert_tokens"]) for e in tiny.events(run, "step")}


def assert_like(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        error = (other[name].float() - tensor.float()).norm() / tensor.float().norm().clamp(min=1e-12)
        assert error <= 1e-4, f"{name}: {error:.1e}"


CHAIN = [
    (4, {"ep": 2, "dense": "zero2"}),
    (2, {"dense": "zero3"}),
    (1, {}),
    (4, {"ep": 4, "dense": "zero3"}),
]


def go_through(folder: Path, chain: Sequence[tuple[int, dict]] = CHAIN, **changes: object) -> tuple[Run, Run]:
    """Two steps of a run in each layout of the chain, on so many ranks; beside it, the run on one process alone.

    Returns (the run on one process, the one that moved), which saw the same tokens. A layout may change other keys of
    the run as well, such as router__placement.
    """
    straight = make(folder, "straight", {}, **changes)
    finish(straight, 1)
    for number, (size, layout) in enumerate(chain):
        others = {key: value for key, value in layout.items() if "__" in key}
        layout = {key: value for key, value in layout.items() if key not in others}
        run = make(folder, "moved", layout, **changes | others)
        finish(run, size)
        if number < len(chain) - 1:
            go_back_to(run, 2 * (number + 1))
    resumed = [event["resumed_step"] for event in tiny.events(run, "start")]
    assert resumed == [None, 2, 4, 6]
    assert tokens_of_steps(run) == tokens_of_steps(straight)
    return straight, run


def test_an_adapter_moves_between_layouts(tmp_path: Path) -> None:
    assert_like(*map(result, go_through(tmp_path)))


def test_full_fine_tuning_moves_between_layouts(tmp_path: Path) -> None:
    assert_like(*map(result, go_through(tmp_path, method__adapter=None)))


def test_the_same_layout_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    go_on_in_the_same_layout(tmp_path, method__adapter__dropout=0.1)


def go_on_in_the_same_layout(folder: Path, **changes: object) -> None:
    """Demands of a run that is ended in its middle and taken up the files of one that is not, to the bit."""
    layout = {"ep": 2, "dense": "zero2"}
    straight, resumed = (make(folder, name, layout, **changes) for name in ("straight", "resumed"))
    finish(straight, 2)
    finish(resumed, 2)
    go_back_to(resumed, 4)
    finish(resumed, 2)
    for name in ("adapter/adapter_model.safetensors", *(f"checkpoints/step-{STEPS:08d}/{f}" for f in STATE_OF_TWO)):
        assert (straight.folder / name).read_bytes() == (resumed.folder / name).read_bytes(), name


STATE_OF_TWO = ("state-00000-of-00002.safetensors", "state-00001-of-00002.safetensors")


def test_a_manifest_lists_the_files_of_every_rank(tmp_path: Path) -> None:
    run = make(tmp_path, "listed", {"dense": "zero3"}, method__adapter=None)
    finish(run, 2)
    last = run.folder / "checkpoints" / f"step-{STEPS:08d}"
    names = [entry["name"] for entry in json.loads((last / "manifest.json").read_text())["files"]]
    assert names == [*STATE_OF_TWO, "state.json"]
    first, second = ((last / name).stat().st_size for name in STATE_OF_TWO)
    assert abs(first - second) < 0.1 * first


def test_saving_leaves_the_optimizer_its_view_of_the_weights(tmp_path: Path) -> None:
    """Saved after every step or only at the end, a run on shared experts' state comes to the same weights."""
    layout = {"ep": 2, "dense": "zero2"}
    often = make(tmp_path, "often", layout)
    once = make(tmp_path, "once", layout)
    once = once.model_copy(update={"train": once.train.model_copy(update={"save_every_steps": STEPS})})
    finish(often, 4)
    finish(once, 4)
    file = "adapter/adapter_model.safetensors"
    assert (often.folder / file).read_bytes() == (once.folder / file).read_bytes()
