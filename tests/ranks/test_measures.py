"""What the step events of many ranks say of them: waiting, spread, memory, and what measuring costs."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from processes import on_ranks
from steps import CPU
from whole_runs import finish

from gatewright.parallel.collectives import METER
from gatewright.parallel.layout import Layout
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.report.facts import machine, throughput
from gatewright.report.read import read_run_folder
from gatewright.spec.errors import EndedByRank, RunFileError
from gatewright.spec.event import StepDone

LATE_S = 0.4


def arrive_late(place: Place) -> tuple[float, float]:
    """Seconds in a sum that rank 1 comes to late, and in the next, to which both come at once."""
    with join_ranks(place, Layout(ranks=place.size), device=CPU, timeout_s=60) as ranks:
        ranks.wait()
        METER.take_s()
        time.sleep(LATE_S * place.rank)
        ranks.wait()
        waited_s = METER.take_s()
        ranks.wait()
        return waited_s, METER.take_s()


def test_who_comes_first_is_who_waits(tmp_path: Path) -> None:
    (first_s, first_next_s), (late_s, late_next_s) = on_ranks(2, tmp_path, arrive_late)
    assert first_s >= 0.8 * LATE_S
    assert max(late_s, first_next_s, late_next_s) < 0.5 * LATE_S


def cost_of_measuring(place: Place) -> float:
    """CPU seconds of one measurement."""
    began = time.process_time()
    for _ in range(10_000):
        with METER.on(CPU):
            pass
    METER.take_s()
    return (time.process_time() - began) / 10_000


def test_measuring_costs_microseconds(tmp_path: Path) -> None:
    """A layer's exchange makes some ten collectives of at least 100 µs each: a hundredth is 1 µs of each."""
    [cost_s] = on_ranks(1, tmp_path, cost_of_measuring)
    assert cost_s < 10e-6


@pytest.mark.parametrize("layout", [{"ep": 2}, {"dense": "zero3"}, {"dense": "zero2"}], ids=str)
def test_steps_of_two_ranks_say_what_each_did(tmp_path: Path, layout: dict[str, object]) -> None:
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    run = tiny.make_run(tmp_path, "qwen3_moe", train__micro_batch_tokens=100, **parallel)
    finish(run, 2)
    steps = [event(row) for row in tiny.events(run, "step")]
    for step in steps:
        assert len(step.rank_step_s) == len(step.rank_data_s) == len(step.rank_wait_s) == 2
        for step_s, data_s, wait_s in zip(step.rank_step_s, step.rank_data_s, step.rank_wait_s, strict=True):
            assert 0 < wait_s < step_s and 0 <= data_s < step_s
        assert step.spread is not None and step.spread >= 1
        assert step.tokens_per_s_rank == pytest.approx(step.tokens / step.step_s / 2)
        assert all(count > 50e6 for count in step.rank_memory_bytes)
        assert step.rank_reserved_bytes == [0, 0], "a CPU has no pool"
        assert step.mfu is None, "nor a rate that is known"
    said = (run.folder.parent / f"{run.run}-rank-0.log").read_text()
    assert "a rank)" in said and "wait " in said and "spread " in said and "MFU" not in said
    report = read_run_folder(run.folder)
    labels = [label for label, _ in throughput(report)]
    assert {"tokens/s a rank, median", "slowest rank", "time in collectives, mean"} <= set(labels)
    assert dict(machine(report))["layout"].startswith("2 ranks: ")
    assert dict(machine(report))["layout"].endswith("as the run file says")
    assert report.unread == {}


def event(row: dict[str, object]) -> StepDone:
    return StepDone(**{name: value for name, value in row.items() if name in StepDone.__dataclass_fields__})


def test_one_process_waits_for_nobody(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama")
    finish(run, 1)
    for row in tiny.events(run, "step"):
        step = event(row)
        assert step.spread is None and step.rank_wait_s == [] and step.tokens_per_s_rank == step.tokens_per_s


def disagree(place: Place) -> str:
    layout = Layout(ranks=place.size, dense="zero2" if place.rank == 1 else "replicate")
    try:
        with join_ranks(place, layout, device=CPU, timeout_s=60):
            return "met"
    except RunFileError as error:
        return str(error)
    except EndedByRank:
        return ""  # another rank has said it
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_that_were_told_different_layouts_say_so(tmp_path: Path) -> None:
    """As on a node with two kinds of GPU, for which auto would choose differently."""
    [said] = filter(None, on_ranks(3, tmp_path, disagree))
    assert "rank 0 is to run 3 ranks: replicate, rank 1 3 ranks: zero2" in said
    assert replace(Layout(ranks=2), dense="zero2") != Layout(ranks=2)
