"""A rank that dies, hangs or is asked to stop ends the run on all ranks in bounded time; a restart goes on."""

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from whole_runs import Started, finish, start

from gatewright.spec.run import Run
from gatewright.train import checkpoint, loop

RANKS = 4
PATIENCE_S = 60
LAYOUT = {"parallel__ep": 2, "parallel__dense": "zero2"}


def make(folder: Path, name: str, *, steps: int = 24, **changes: object) -> Run:
    return tiny.make_run(
        folder, "qwen3_moe", run=name, train__steps=steps, train__save_every_steps=2, train__micro_batch_tokens=100,
        method__adapter__dropout=0.1, **LAYOUT | changes,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"no {what}"
        time.sleep(0.001)


def wait_for_step(run: Run, step: int) -> None:
    log = run.folder / "events.jsonl"
    wait_for(lambda: log.exists() and step in {e["step"] for e in tiny.events(run, "step")}, f"step {step}")


def result(run: Run) -> dict[str, bytes]:
    """The bytes of the adapter and of every rank's last state."""
    last = max((run.folder / "checkpoints").glob("step-*"))
    files = [*sorted(last.glob("state-*.safetensors")), run.folder / "adapter" / "adapter_model.safetensors"]
    return {file.name: file.read_bytes() for file in files}


def saving(run: Run, *, since: float) -> bool:
    """Whether a save is under way that began after that time: a kill leaves others behind, until the next start."""
    found = (run.folder / "checkpoints").glob(".partial-step-*")
    with contextlib.suppress(FileNotFoundError):  # renamed in between
        return any(folder.stat().st_mtime > since for folder in found)
    return False


def kill_one(started: Started, draw: random.Random, *, after_s: float, in_a_save: bool) -> tuple[bool, bool]:
    """Kills a rank after some time, or as soon as a save is under way: (whether it was killed, in a save)."""
    began, run = time.time(), started.run
    until = began + (10 if in_a_save else 1) * after_s
    while time.time() < until and not (in_a_save and saving(run, since=began)):
        time.sleep(0.001)
    in_save = saving(run, since=began)
    os.kill(started.pids[draw.randrange(RANKS)], signal.SIGKILL)
    codes = started.wait(patience_s=PATIENCE_S)
    return any(codes), in_save


def saved(run: Run) -> list[int]:
    """Steps of the complete checkpoints."""
    return [found.step for found in checkpoint.complete(run.folder / "checkpoints")]


@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_ranks_killed_at_any_moment_change_nothing(tmp_path: Path, kills: int) -> None:
    """Every third kill in the middle of a save; each time all ranks end; the last weights are those of a quiet run.

    Every second start saves in the background, the others in the foreground.
    """
    undisturbed = make(tmp_path, "undisturbed")
    began = time.monotonic()
    finish(undisturbed, RANKS)
    whole_s = time.monotonic() - began
    draw, done, in_saves = random.Random(0), 0, 0
    # A rank that dies before it has met the others is waited for.
    settings = [make(tmp_path, "killed-0", train__save_in_background=b, parallel__timeout_s=10) for b in (True, False)]
    runs = [settings[0]]
    while done < kills:
        in_a_save = done % 3 == 0
        after_s = draw.uniform(0.2, 0.9) * whole_s
        now = settings[done % 2].model_copy(update={"run": runs[-1].run})
        killed, in_save = kill_one(start(now, RANKS), draw, after_s=after_s, in_a_save=in_a_save)
        done += killed
        in_saves += killed and in_save
        if not killed:
            runs.append(runs[0].model_copy(update={"run": f"killed-{len(runs)}"}))
    finish(runs[-1], RANKS)
    assert in_saves >= kills // 6
    for run in runs:
        assert result(run) == result(undisturbed), run.run


@pytest.mark.parametrize("victim", [2, 0])
def test_what_is_said_when_a_rank_dies(tmp_path: Path, victim: int) -> None:
    """Once, but where the store dies with rank 0."""
    run = make(tmp_path, "dies", steps=10_000)
    started = start(run, RANKS)
    wait_for_step(run, 3)
    began = time.monotonic()
    os.kill(started.pids[victim], signal.SIGKILL)
    codes = started.wait(patience_s=PATIENCE_S)
    assert time.monotonic() - began < 20
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(RANKS)]
    said = [log for log in map(started.log, range(RANKS)) if "lost contact with another rank" in log]
    assert len(said) == 1 or (victim == 0 and said), "the reason is told once"
    assert checkpoint.newest_sound(run.folder / "checkpoints", warn=print).step >= 2


def test_a_rank_that_hangs_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    run = make(tmp_path, "hangs", steps=10_000, parallel__timeout_s=5)
    started = start(run, RANKS)
    wait_for_step(run, 3)
    began = time.monotonic()
    os.kill(started.pids[1], signal.SIGSTOP)
    alive = [pid for rank, pid in enumerate(started.pids) if rank != 1]
    while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in alive):
        assert time.monotonic() - began < 40, "the others wait for longer than the time-out"
        time.sleep(0.05)
    os.kill(started.pids[1], signal.SIGKILL)
    started.wait(patience_s=PATIENCE_S)
    text = "".join(started.log(rank) for rank in (0, 2, 3))
    assert "Timed out waiting" in text and "lost contact with another rank" in text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_stops_and_saves_all(tmp_path: Path, name: str) -> None:
    quiet, stopped = make(tmp_path, "quiet", steps=12), make(tmp_path, "stopped", steps=12)
    finish(quiet, RANKS)
    started = start(stopped, RANKS)
    began = time.time()
    wait_for_step(stopped, 3)
    wait_for(lambda: saving(stopped, since=began), "save under way")
    os.kill(started.pids[3], signal.Signals[name])
    codes = started.wait(patience_s=PATIENCE_S)
    if codes != [0] * RANKS:  # it may have been at its end
        assert codes == [loop.SAVED] * RANKS, [started.log(rank) for rank in range(RANKS)]
        assert "start the same command again to go on" in started.log(0)
        finish(stopped, RANKS)
    assert result(stopped) == result(quiet)


def test_a_flipped_byte_costs_one_checkpoint(tmp_path: Path) -> None:
    quiet, damaged = make(tmp_path, "quiet", steps=8), make(tmp_path, "damaged", steps=8)
    finish(quiet, RANKS)
    finish(damaged, RANKS)
    file = damaged.folder / "checkpoints" / "step-00000008" / "state-00002-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    started = start(damaged, RANKS)
    assert started.wait(patience_s=PATIENCE_S) == [0] * RANKS
    assert "state-00002-of-00004.safetensors does not have the hash in the manifest" in started.log(0)
    assert "going on after step 6/8" in started.log(0)
    assert result(damaged) == result(quiet)


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_up_under_one_rank_ends_all_and_keeps_what_was(tmp_path: Path, background: bool) -> None:
    """Rank 3 may write no file of more than 1,000 bytes, from some moment on."""
    run = make(tmp_path, "full", steps=10_000, train__save_in_background=background)
    started = start(run, RANKS)
    wait_for(lambda: bool(saved(run)), "complete checkpoint")
    resource.prlimit(started.pids[3], resource.RLIMIT_FSIZE, (1000, 1000))
    codes = started.wait(patience_s=PATIENCE_S)
    logs = [started.log(rank) for rank in range(RANKS)]
    assert codes == [1] * RANKS, logs
    said = [log for log in logs if "not saved (rank 3: " in log and "File too large" in log]
    assert len(said) == 1, logs
    newest = checkpoint.newest_sound(run.folder / "checkpoints", warn=pytest.fail)
    assert newest is not None and newest.step == max(saved(run))
    assert {event["step"] for event in tiny.events(run, "save")} <= set(range(2, newest.step + 1, 2))


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    run = make(tmp_path, "joins", parallel__timeout_s=3)
    started = start(run, RANKS, absent=[2])
    assert started.wait(patience_s=PATIENCE_S) == [1, 1, 1]
    said = [log for log in map(started.log, (0, 1, 3)) if "rank 2 of 4 had not come after 3 s" in log]
    assert len(said) == 1, "the reason is told once"
    assert not run.folder.exists()
