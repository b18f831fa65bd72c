"""Layouts and environments that cannot be: an error that says what to change, on all ranks, and nothing written."""

import os
import signal
import time
from pathlib import Path

import pytest
import tiny
from whole_runs import finish, start

from gatewright.parallel.layout import Layout, layout_of, refuse_experts
from gatewright.parallel.place import ALONE, Place, find_place, first_host
from gatewright.spec.errors import RunFileError, UserError
from gatewright.spec.run import Parallel
from gatewright.train.checkpoint import complete, newest_sound


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [
        ({"ep": 2}, 1, r"parallel\.ep = 2 needs several ranks, and this is one process; start it with --nproc N"),
        ({"ep": 3}, 4, r"parallel\.ep = 3 does not divide the 4 ranks; use 1, 2, 4"),
        ({"ep": 4, "dp_replicate": 2}, 4, r"parallel\.ep = 4 does not divide the 2 ranks of a copy; use 1, 2"),
        ({"dp_replicate": 3}, 4, r"parallel\.dp_replicate = 3 does not divide the 4 ranks; use 1, 2, 4"),
        ({"cp": 3}, 4, r"parallel\.cp = 3 does not divide the 4 ranks; use 1, 2, 4"),
    ],
)
def test_a_layout_that_cannot_be(parallel: dict[str, object], ranks: int, message: str) -> None:
    with pytest.raises(RunFileError, match=message):
        layout_of(Parallel(**parallel), ranks=ranks)


def test_experts_that_cannot_be_dealt() -> None:
    with pytest.raises(RunFileError, match=r"ep = 4 does not divide the 6 experts of a layer; use 1, 2, 3, 6"):
        refuse_experts(Layout(ranks=4, ep=4), 6)
    with pytest.raises(RunFileError, match="no routed experts; set ep: 1"):
        refuse_experts(Layout(ranks=4, ep=4), 0)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_moe", {"parallel__ep": 3}, "parallel.ep = 3 does not divide the 2 ranks"),
        ("llama", {"parallel__ep": 2}, "this model has no routed experts; set ep: 1"),
        ("qwen3_moe", {"data__max_tokens": 20}, "longer than data.max_tokens = 20"),
    ],
)
def test_a_mistake_ends_all_ranks_and_is_told_once(
    tmp_path: Path, kind: str, changes: dict[str, object], message: str
) -> None:
    run = tiny.make_run(tmp_path, kind, **changes)
    started = start(run, 2)
    assert started.wait(patience_s=60) == [2, 2]
    logs = [started.log(rank) for rank in range(2)]
    assert any(message in log for log in logs), logs
    assert not (run.folder / "checkpoints").exists() and not (run.folder / "adapter").exists()


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second is refused, and leaves alone what the first is saving at that moment."""
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=100_000, train__save_every_steps=1)
    first, until = start(run, 2), time.monotonic() + 60
    while not complete(run.folder / "checkpoints"):
        assert time.monotonic() < until, first.log(0)
        time.sleep(0.01)
    # Not the same logs: this one is the second.
    second = start(run.model_copy(update={"run": "tiny"}), 2)
    assert second.wait(patience_s=60) == [2, 2]
    assert any("is working in it" in second.log(rank) for rank in range(2))
    os.kill(first.pids[1], signal.SIGTERM)
    assert first.wait(patience_s=60) == [85, 85]
    assert newest_sound(run.folder / "checkpoints", warn=pytest.fail).step == tiny.events(run, "stop")[0]["step"]


def test_another_number_of_ranks_where_it_may_not_be(tmp_path: Path) -> None:
    """`parallel` may change at a resume, but 3 ranks cannot hold experts for 2: refused, and nothing is touched."""
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=2, train__save_every_steps=1, parallel__ep=2)
    finish(run, 2)
    before = {file: file.stat().st_mtime_ns for file in run.folder.rglob("*")}
    started = start(run, 3)
    assert started.wait(patience_s=60) == [2, 2, 2]
    assert "parallel.ep = 2 does not divide the 3 ranks; use 1, 3" in started.log(0)
    assert {file: file.stat().st_mtime_ns for file in run.folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("nid001", "nid001"),
        ("nid001,nid002", "nid001"),
        ("nid[0012-0020,0031]", "nid0012"),
        ("gpu-[3,7]-x", "gpu-3-x"),
        ("a1,b[2-4]", "a1"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_the_place_that_srun_tells() -> None:
    step = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "nid[004-005]",
    }  # fmt: skip
    place = find_place(step)
    assert (place.rank, place.size, place.local_rank, place.address) == (5, 8, 1, "nid004")
    assert find_place(step) == place and 20000 <= place.port < 30000
    assert find_place({"SLURM_PROCID": "0", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}) == ALONE  # in sbatch, not srun
    with pytest.raises(UserError, match="SLURM_LOCALID"):
        find_place({name: value for name, value in step.items() if name != "SLURM_LOCALID"})


def test_the_place_that_torchrun_tells() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert find_place(told) == Place(rank=1, size=2, local_rank=1, local_size=2, address="h", port=29500)
    with pytest.raises(UserError, match=r"MASTER_PORT = 'x' in the environment is not a number"):
        find_place(told | {"MASTER_PORT": "x"})
