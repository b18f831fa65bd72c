"""Ranks started from the command line, and what the checkpoint verbs say of what they leave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from processes import free_ports

from gatewright.spec.read import dump_run


def gatewright(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gatewright", *arguments], capture_output=True, text=True, timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = tiny.make_run(folder, "qwen3_moe", train__micro_batch_tokens=100, train__save_every_steps=2, parallel__ep=2)
    file = folder / "run.yaml"
    file.write_text(dump_run(run))
    return file


def test_two_ranks_from_the_command_line(run_file: Path) -> None:
    done = gatewright("train", str(run_file), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 4/4") == 1, "only one rank prints"
    assert "layout    2 ranks: ep 2, replicate" in done.stdout
    root = run_file.parent / "runs" / "tiny" / "checkpoints"
    last = root / "step-00000004"

    listed = gatewright("checkpoint", "list", str(run_file))
    assert [line.split("  ")[1] for line in listed.stdout.splitlines()] == ["step 2", "step 4"]
    assert "written by 2 ranks" in listed.stdout

    one = gatewright("checkpoint", "consolidate", str(last), str(run_file.parent / "one"))
    assert one.returncode == 0, one.stderr
    assert (run_file.parent / "one" / "step-00000004" / "state.safetensors").is_file()
    assert gatewright("checkpoint", "verify", str(run_file.parent / "one")).returncode == 0

    state = last / "state-00001-of-00002.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    verified = gatewright("checkpoint", "verify", str(root))
    assert verified.returncode == 1
    assert f"{root / 'step-00000002'}  sound" in verified.stdout
    assert "damaged: state-00001-of-00002.safetensors has" in verified.stdout


def test_a_mistake_comes_before_any_rank_is_started(run_file: Path) -> None:
    done = gatewright("train", str(run_file), "--nproc", "2", "--set", "parallel.ep=3")
    assert done.returncode == 2
    assert done.stderr.count("parallel.ep = 3 does not divide the 2 ranks; use 1, 2") == 1


def test_parity_from_the_command_line(run_file: Path) -> None:
    done = gatewright("check", str(run_file), "--parity", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks: ep 2, replicate, cpu, float32: divided experts compute the same within 1e-05" in done.stdout


def test_two_tasks_of_an_srun_step(run_file: Path) -> None:
    """The variables of SLURM alone; that srun sets them so is tried where there is a SLURM."""
    [port] = free_ports(1)
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "gatewright", "train", str(run_file), "--set", "run=by-srun"]
    tasks = [
        subprocess.Popen(
            command, env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=200) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert ["step 4/4" in out for out, _ in said] == [True, False]
