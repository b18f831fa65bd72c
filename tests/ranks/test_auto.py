"""`parallel: auto` on many ranks: what was chosen is written down, printed, and taken up again by another number."""

from pathlib import Path

import pytest
import tiny
from test_command_line import gatewright
from test_resharding import go_back_to, make, result, tokens_of_steps
from whole_runs import finish

from gatewright.planner.catalogue import find_gpu
from gatewright.planner.start import Devices, choose_layout
from gatewright.spec.read import dump_run, read_run
from gatewright.spec.run import Parallel, Run


def test_on_cpus_auto_replicates_and_says_why(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", train__micro_batch_tokens=100)
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run))
    done = gatewright("train", str(file), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("layout")]
    assert len(said) == 1 and said[0].startswith("layout    2 ranks: replicate: auto replicates: CPU (")
    assert said[0].endswith("is not in the planner's catalogue of GPUs")
    [chosen] = tiny.events(run, "layout")
    assert chosen["ranks"] == 2 and chosen["layout"] == "2 ranks: replicate" and "auto replicates" in chosen["reason"]
    assert read_run(run.folder / "run.yaml").parallel == Parallel()
    assert read_run(file).parallel == "auto"


def planned(run: Run, ranks: int) -> Run:
    """The run as it would start on so many GPUs."""
    gpu = find_gpu("h200")
    return choose_layout(run, Devices(ranks=ranks, per_node=ranks, device="NVIDIA H200", gpu=gpu)).run


def test_auto_is_asked_anew_when_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two steps on 2 ranks as planned, two on one, the rest on 4 as planned; beside it, one process alone."""
    straight = make(tmp_path, "straight", {}, model__dtype="bfloat16")
    finish(straight, 1)
    moved = make(tmp_path, "moved", {}, model__dtype="bfloat16")
    for number, ranks in enumerate((2, 1, 4), start=1):
        run = planned(moved, ranks)
        finish(run, ranks)
        if ranks != 4:
            go_back_to(run, 2 * number)
    assert [event["layout"] for event in tiny.events(run, "layout")] == ["2 ranks: zero2", "4 ranks: zero2"]
    assert [event["resumed_step"] for event in tiny.events(run, "start")] == [None, 2, 4]
    one, other = tokens_of_steps(straight), tokens_of_steps(run)
    assert {step: counts[:2] for step, counts in one.items()} == {step: counts[:2] for step, counts in other.items()}
    assert read_run(run.folder / "run.yaml").parallel == Parallel(dense="zero2")
    assert {name: tensor.shape for name, tensor in result(straight).items()} == {
        name: tensor.shape for name, tensor in result(run).items()
    }
    losses = [[row["loss"] for row in tiny.events(item, "step")][-1] for item in (straight, run)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3), "bfloat16"
