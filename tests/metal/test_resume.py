"""A run that is killed, interrupted or asked to stop goes on to the same bits as one that was left alone."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file

from gatewright.spec.errors import RunFileError
from gatewright.spec.run import Run
from gatewright.train import loop

KILLS = 24


def child(run: Run) -> int:
    """Starts the run in a forked process of its own (imports are done, so it begins at once); returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            with (run.folder.parent / f"{run.run}.log").open("a") as log:
                code = loop.train(run, console=Console(file=log))
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return pid


def finish(run: Run) -> None:
    """Runs to the end in a child, as every part of the killed run does, and demands success."""
    _, status = os.waitpid(child(run), 0)
    assert os.waitstatus_to_exitcode(status) == 0, (run.folder.parent / f"{run.run}.log").read_text()


def result(run: Run) -> dict[str, bytes]:
    """All that a finished run leaves: the bytes of its adapter and of its last optimizer state."""
    last = max((run.folder / "checkpoints").glob("step-*"))
    return {
        "adapter": (run.folder / "adapter" / "adapter_model.safetensors").read_bytes(),
        "state": (last / "state.safetensors").read_bytes(),
    }


def long_run(folder: Path, name: str) -> Run:
    return tiny.make_run(
        folder, "qwen3_moe", run=name, train__steps=40, train__save_every_steps=2, method__adapter__dropout=0.1,
        train__warmup_steps=5, evaluate__data=str(folder / "heldout.jsonl"), evaluate__every_steps=7,
    )  # fmt: skip


def is_saving(run: Run, *, since: float) -> bool:
    """Whether a save is under way that began after that time: a kill leaves others behind, until the next start."""
    with contextlib.suppress(FileNotFoundError):  # renamed in between
        return any(p.stat().st_mtime > since for p in (run.folder / "checkpoints").glob(".partial-step-*"))
    return False


def kill_at(run: Run, *, deadline_s: float, in_a_save: bool) -> tuple[bool, bool]:
    """Starts the run and kills it at the deadline, or as soon as a save is under way: (killed, in a save)."""
    pid, began = child(run), time.time()
    while True:
        saving = is_saving(run, since=began)
        elapsed_s = time.time() - began
        if elapsed_s > (10 if in_a_save else 1) * deadline_s or (in_a_save and saving):
            os.kill(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, -signal.SIGKILL), (run.folder.parent / f"{run.run}.log").read_text()
            return code != 0, saving
        time.sleep(0.001)


def test_kill_nine_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    """Over 20 kills, every third one in the middle of a save; weights, optimizer and RNG end as if nothing had been.

    Every second start saves in the background, the others in the foreground.
    """
    undisturbed = long_run(tmp_path, "undisturbed")
    undisturbed.folder.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    finish(undisturbed)
    whole_s = time.monotonic() - began

    draw = random.Random(0)
    kills = kills_in_a_save = 0
    runs = [long_run(tmp_path, "killed-0")]
    while kills < KILLS:
        in_a_save = kills % 3 == 0
        train = runs[-1].train.model_copy(update={"save_in_background": kills % 2 == 0})
        now = runs[-1].model_copy(update={"train": train})
        killed, saving = kill_at(now, deadline_s=draw.uniform(0.05, 0.3) * whole_s, in_a_save=in_a_save)
        kills += killed
        kills_in_a_save += killed and saving
        if not killed:  # it came to its end in between: take up another one
            runs.append(long_run(tmp_path, f"killed-{len(runs)}"))
    finish(runs[-1])
    assert kills_in_a_save >= 4
    for run in runs:
        assert result(run) == result(undisturbed), run.run
        assert not list((run.folder / "checkpoints").glob(".partial*"))


def test_one_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    undisturbed, stopped = long_run(tmp_path, "undisturbed"), long_run(tmp_path, "stopped")
    stopped.folder.parent.mkdir(exist_ok=True)
    pid = child(stopped)
    while not (stopped.folder / "events.jsonl").exists() or not tiny.events(stopped, "step"):
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    log = (stopped.folder.parent / "stopped.log").read_text()
    assert "stopping after this step" in log
    assert "start the same command again to go on" in log
    [stop] = tiny.events(stopped, "stop")
    assert stop["reason"] == "interrupted" and stop["detail"] == "SIGINT" and 0 < stop["step"] < 40
    finish(stopped)
    finish(undisturbed)
    assert result(stopped) == result(undisturbed)
    assert tiny.events(stopped, "start")[1]["resumed_step"] == stop["step"]


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=100000)
    run.folder.parent.mkdir(exist_ok=True)
    pid = child(run)
    while not (run.folder / "events.jsonl").exists() or not tiny.events(run, "step"):
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGINT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama")
    assert loop.train(run, console=Console(quiet=True)) == 0
    before = (run.folder / "events.jsonl").read_bytes()
    console = Console(record=True, width=200)
    assert loop.train(run, console=console) == 0
    assert "tiny is finished: 4 steps" in console.export_text()
    assert (run.folder / "events.jsonl").read_bytes() == before


def test_another_process_in_the_folder_is_refused(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=100000)
    run.folder.parent.mkdir(exist_ok=True)
    pid = child(run)
    try:
        while not (run.folder / "events.jsonl").exists() or not tiny.events(run, "step"):
            time.sleep(0.01)
        with pytest.raises(RunFileError, match=f"process {pid} on .* is working in it"):
            loop.train(run, console=Console(quiet=True))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama", train__save_every_steps=2)
    assert loop.train(run, console=Console(quiet=True)) == 0
    other = tiny.make_run(tmp_path, "llama", train__save_every_steps=1, train__lr=1.0)
    with pytest.raises(RunFileError, match=r"train\.lr: 0\.005 then, 1\.0 now"):
        loop.train(other, console=Console(quiet=True))


def test_other_data_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama", train__steps=6, train__save_every_steps=2)
    assert loop.train(run, console=Console(quiet=True)) == 0
    (run.folder / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    tiny.save_rows(tmp_path / "train.jsonl", 61)
    with pytest.raises(RunFileError, match="was trained on another data"):
        loop.train(run, console=Console(quiet=True))


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(tmp_path: Path) -> None:
    undisturbed, damaged = long_run(tmp_path, "undisturbed"), long_run(tmp_path, "damaged")
    for run in (undisturbed, damaged):
        assert loop.train(run, console=Console(quiet=True)) == 0
    last = damaged.folder / "checkpoints" / "step-00000040"
    content = bytearray((last / "state.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (last / "state.safetensors").write_bytes(content)
    console = Console(record=True, width=300)
    assert loop.train(damaged, console=console) == 0
    text = console.export_text()
    assert "state.safetensors does not have the hash in the manifest" in text
    assert "going on after step 38/40" in text
    assert result(damaged) == result(undisturbed)


def test_diverging_stops_with_the_batch_saved(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama", train__steps=50, train__lr=1e30, train__clip_norm=None)
    with pytest.raises(Exception, match=r"step \d+: loss .*; the weights were not updated") as raised:
        loop.train(run, console=Console(quiet=True))
    assert raised.value.exit_code == 1
    [file] = run.folder.glob("diverged-step-*.safetensors")
    assert file.name in str(raised.value)
    tensors = load_file(file)
    assert tensors["0/tokens"].shape == tensors["0/labels"].shape and torch.is_tensor(tensors["0/documents"])
    assert tiny.events(run, "stop")[0]["reason"] == "failed"
