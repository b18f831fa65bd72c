"""A signal or a clock on one rank stops all of them after the same step, and what they save goes on."""

import os
import signal
import time
from pathlib import Path

import pytest
import tiny
from whole_runs import start

from gatewright.spec.run import Run
from gatewright.train.checkpoint import newest_sound


def endless(folder: Path) -> Run:
    return tiny.make_run(
        folder, "qwen3_moe", run="endless", train__steps=100_000, train__save_every_steps=100_000,
        train__micro_batch_tokens=100, parallel__ep=2,
    )  # fmt: skip


def test_a_signal_on_one_rank_stops_both_after_the_same_step(tmp_path: Path) -> None:
    run = endless(tmp_path)
    started = start(run, 2)
    until = time.monotonic() + 60
    while not (run.folder / "events.jsonl").exists() or len(tiny.events(run, "step")) < 3:
        assert time.monotonic() < until, started.log(0)
        time.sleep(0.02)
    os.kill(started.pids[1], signal.SIGUSR1)
    assert started.wait(patience_s=60) == [85, 85], started.log(0) + started.log(1)
    [stop] = tiny.events(run, "stop")
    assert (stop["reason"], stop["detail"]) == ("interrupted", "asked on another rank")
    newest = newest_sound(run.folder / "checkpoints", warn=print)
    assert newest is not None and newest.step == stop["step"] == tiny.events(run, "step")[-1]["step"]


def test_only_the_first_ranks_clock_counts_and_both_leave_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = endless(tmp_path)
    end = time.time() + 12.0
    monkeypatch.setenv("GATEWRIGHT_END_TIME", str(end))
    monkeypatch.setenv("GATEWRIGHT_LINK_STARTED", str(time.time()))
    started = start(run, 2)
    assert started.wait(patience_s=60) == [85, 85], started.log(0) + started.log(1)
    assert time.time() < end + 1.0
    [stop] = tiny.events(run, "stop")
    assert str(stop["detail"]).startswith("time limit in")
    assert newest_sound(run.folder / "checkpoints", warn=print) is not None
