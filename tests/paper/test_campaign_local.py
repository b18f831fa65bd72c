"""A campaign on this machine, without SLURM: the same links as child processes. And a disk that takes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gatewright.campaign.folder import JobsFolder, StageFolder

STANDIN = Path(__file__).parent.parent / "slurm" / "standin.py"
GATEWRIGHT = (sys.executable, "-m", "gatewright")


def campaign(folder: Path, *, options: str = "", limit: str = "2s", links: int = 9, more: str = "") -> Path:
    command = f"{sys.executable} {STANDIN} runs/sft --steps 60 --step-s 0.05 --save-every 5 {options}"
    file = folder / "chain.yaml"
    file.write_text(
        f"campaign: chain\ncluster: {{time_limit: {limit}}}\nstages:\n"
        f"  sft: {{command: {json.dumps(command)}, folder: runs/sft, links: {links}}}\n{more}"
    )
    return file


def submit(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*GATEWRIGHT, "submit", "chain.yaml", "--local", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def sft(folder: Path) -> StageFolder:
    return JobsFolder(folder / "runs" / "chain" / "jobs").stage("sft")


def test_a_chain_of_child_processes_and_the_stages_after_it(tmp_path: Path) -> None:
    after = "  a: {command: 'sleep 0.3; date +%s.%N > a', needs: [sft], outputs: [a]}\n"
    after += "  b: {command: 'sleep 0.3; date +%s.%N > b', needs: [sft], outputs: [b]}\n"
    campaign(tmp_path, more=after + "  c: {command: 'cat a b > c', needs: [a, b], outputs: [c]}\n")
    done = submit(tmp_path, "--at-once", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lives = sft(tmp_path).lives()
    assert [life.outcome for life in lives] == ["saved"] * (len(lives) - 1) + ["done"] and len(lives) >= 3
    assert (tmp_path / "c").read_text() == (tmp_path / "a").read_text() + (tmp_path / "b").read_text()
    again = submit(tmp_path)
    assert again.returncode == 0 and len(sft(tmp_path).lives()) == len(lives)
    shown = subprocess.run([*GATEWRIGHT, "status", "chain"], cwd=tmp_path, capture_output=True, text=True)
    assert "60/60" in shown.stdout and "done" in shown.stdout
    logs = subprocess.run([*GATEWRIGHT, "logs", "chain", "sft", "-f"], cwd=tmp_path, capture_output=True, text=True)
    assert "the stage is done" in logs.stdout


def test_a_failure_that_a_retry_cannot_cure_is_tried_once(tmp_path: Path) -> None:
    """The doctor knows the sentence; the chain halts with its cause, and the later stage never starts."""
    sentence = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 "
        "GiB of which 1.10 GiB is free. Process 1 has 78.14 GiB memory in use. Of the allocated memory 77.30 GiB is "
        "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    campaign(tmp_path, options=f"--fail-at 12 --say '{sentence}'", more="  a: {command: 'touch a', needs: [sft]}\n")
    done = submit(tmp_path)
    assert done.returncode == 1
    [life] = sft(tmp_path).lives()
    assert life.outcome == "failed" and "GW506 oom-pressure" in life.reason
    assert not (tmp_path / "a").exists()
    assert "GW506" in done.stdout


def test_a_crash_without_a_name_is_tried_again_until_it_stands_still(tmp_path: Path) -> None:
    campaign(tmp_path, options="--fail-at 12 --say 'something odd'", limit="1m")
    assert submit(tmp_path).returncode == 1
    lives = sft(tmp_path).lives()
    assert [(life.outcome, life.checkpoint_after) for life in lives] == [("crashed", 10)] * 3
    halt = json.loads(sft(tmp_path).halt.read_text())["reason"]
    assert halt.startswith("2 links in a row ended without a newer checkpoint")


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    campaign(tmp_path, limit="5m", options="--step-s 0.2")  # long enough for a busy machine to see it at work
    command = [*GATEWRIGHT, "submit", "chain.yaml", "--local"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs/sft/checkpoints/step-00000005").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == 130, said
    [life] = sft(tmp_path).lives()
    assert life.outcome == "saved" and life.checkpoint_after == life.last_step >= 5
    assert submit(tmp_path).returncode == 0
    assert sft(tmp_path).lives()[1].checkpoint_before == life.checkpoint_after


def test_a_disk_that_takes_nothing_is_one_sentence_and_nothing_is_started(tmp_path: Path) -> None:
    campaign(tmp_path)
    command = f"ulimit -f 0; exec {' '.join(GATEWRIGHT)} submit chain.yaml --local"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: " in done.stderr and "nothing was submitted" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs/sft").exists()
    assert not (tmp_path / "runs/chain/jobs/campaign.json").exists()


def test_without_slurm_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    campaign(tmp_path)
    command = [*GATEWRIGHT, "submit", "chain.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/nowhere"}, timeout=60)
    assert done.returncode == 2
    assert "there is no SLURM here" in done.stderr and "--local" in done.stderr
    assert not (tmp_path / "runs").exists()
