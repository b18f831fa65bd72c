"""What the report says of many ranks: how well and how evenly they were used, and what each had in memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from gatewright.report.facts import machine, throughput
from gatewright.report.html import render_html
from gatewright.report.read import read_run_folder
from gatewright.spec.event import StepDone

GIB = 2**30
STEP: dict[str, Any] = {
    "loss": 2.0, "lr": 1e-4, "grad_norm": 1.0, "tokens": 8000, "target_tokens": 4000, "micro_batches": 2, "step_s": 2.0,
    "data_s": 0.0, "forward_s": 0.5, "backward_s": 1.0, "optimizer_s": 0.1, "memory_bytes": 50 * GIB,
    "dropped_tokens": 0,
    "rank_step_s": [2.0, 2.0], "rank_data_s": [0.0, 0.1], "rank_wait_s": [1.0, 0.5], "mfu": 0.25,
    "rank_memory_bytes": [50 * GIB, 60 * GIB], "reserved_bytes": 55 * GIB, "rank_reserved_bytes": [55 * GIB, 66 * GIB],
}  # fmt: skip


def write_events(folder: Path, *steps: dict[str, Any]) -> Path:
    start = {"kind": "start", "run": "r", "versions": {}, "device": "NVIDIA H200", "threads": 1, "resumed_step": None}
    layout = {"kind": "layout", "ranks": 2, "layout": "2 ranks: ep 2, zero2", "reason": "planned for h200"}
    rows = [layout, start | {"steps": 2}, *({"kind": "step", **step} for step in steps)]
    lines = [json.dumps({"v": 1, "time": f"2026-11-30T08:00:0{i}+00:00", **row}) for i, row in enumerate(rows)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_two_ranks_in_the_report(tmp_path: Path) -> None:
    slower = STEP | {"step": 2, "mfu": 0.15, "rank_wait_s": [1.5, 0.5]}
    report = read_run_folder(write_events(tmp_path, STEP | {"step": 1}, slower))
    said = dict(throughput(report))
    assert said["MFU, median of steps"] == "20.0 %"
    assert said["tokens/s a rank, median"] == "2,000"
    # Own work 1.0 and 1.5 s, then 0.5 and 1.5 s: over the medians 1.25 and 1.0 s.
    assert said["slowest rank"] == "1.35 × the median rank's own work; worst step 1.50 ×"
    assert said["time in collectives, mean"] == "43.8 %"
    assert said["peak by rank, allocated on the GPU"] == "50.00 GiB, 60.00 GiB"
    assert said["peak by rank, reserved"] == "55.00 GiB, 66.00 GiB"
    assert dict(machine(report))["layout"] == "2 ranks: ep 2, zero2: planned for h200"
    assert report.unread == {}
    page = render_html(report)
    assert "tokens/s a rank, median" in page and "ep 2, zero2: planned for h200" in page


def test_of_many_ranks_the_fullest_is_named(tmp_path: Path) -> None:
    sixteen = {"rank_step_s": [2.0] * 16, "rank_data_s": [0.0] * 16, "rank_wait_s": [1.0] * 16}
    memory = {"rank_memory_bytes": [50 * GIB] * 11 + [61 * GIB] + [52 * GIB] * 4, "rank_reserved_bytes": [0] * 16}
    said = dict(throughput(read_run_folder(write_events(tmp_path, STEP | sixteen | memory | {"step": 1}))))
    assert said["peak by rank, allocated on the GPU"] == "50.00 GiB to 61.00 GiB (rank 11), 16 ranks"
    assert "peak by rank, reserved" not in said


def test_one_process_and_older_runs_have_none_of_it(tmp_path: Path) -> None:
    alone = {name: value for name, value in STEP.items() if not name.startswith("rank_") and name != "mfu"}
    said = dict(throughput(read_run_folder(write_events(tmp_path, alone | {"step": 1}))))
    assert not {"MFU, median of steps", "slowest rank", "tokens/s a rank, median"} & set(said)


@pytest.mark.parametrize(
    ("wait_s", "spread"), [([1.0, 1.0, 1.0], 1.0), ([0.0, 1.0, 1.0], 2.0), ([2.0, 2.0, 2.0], None)]
)
def test_the_spread_is_of_own_work(wait_s: list[float], spread: float | None) -> None:
    fields = {name: value for name, value in STEP.items() if name != "rank_wait_s"}
    step = StepDone(**fields | {"step": 1, "rank_step_s": [2.0] * 3, "rank_wait_s": wait_s})
    assert step.spread == (None if spread is None else pytest.approx(spread))
