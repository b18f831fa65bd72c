"""A run folder is read as it stands: restarts, broken lines, strangers, and runs of any length."""

import math
import random
import tracemalloc
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import synthetic_run as synthetic

from gatewright.report.loads import WINDOWS, LoadsInTime
from gatewright.report.read import read_run_folder
from gatewright.report.series import POINTS, reduce
from gatewright.report.summary import Report, wilson_interval
from gatewright.spec.errors import UserError

Events = list[dict[str, Any]]


def read(folder: Path, events: Events, *, after: timedelta = timedelta(seconds=1)) -> Report:
    clock = synthetic.BEGIN + after
    return read_run_folder(synthetic.write_run(folder, events), now=clock)


def steps_of(events: Events) -> Events:
    return [event for event in events if event["kind"] == "step"]


def summed(steps: Events) -> list[list[int]]:
    layers = zip(*(step["expert_tokens"] for step in steps), strict=True)
    return [[sum(expert) for expert in zip(*layer, strict=True)] for layer in layers]


class Restarted:
    """A log in pieces: 30 steps, then again from `resumed`."""

    def __init__(self, *, resumed: int | None) -> None:
        self.noise, self.clock = random.Random(3), synthetic.Clock()
        self.routing = synthetic.Routing(layers=3, experts=4, noise=self.noise, tokens=8000)
        self.first = [
            self.clock.event("finding", 0, severity="warning", text="of every process"),
            *self.load(),
            synthetic.start(self.clock, steps=60),
            synthetic.evaluated(self.clock, 0, of=60, noise=self.noise),
            self.clock.event("finding", 0, severity="error", text="of the first process"),
            *self.steps(1, 20),
            synthetic.evaluated(self.clock, 20, of=60, noise=self.noise),
            synthetic.saved(self.clock, 20),
            *self.steps(21, 30),
            synthetic.evaluated(self.clock, 30, of=60, noise=self.noise),
            synthetic.saved(self.clock, 30),
        ]
        self.clock.now += timedelta(hours=3)
        self.second = [
            self.clock.event("finding", 0, severity="warning", text="of every process"),
            *self.load(),
            synthetic.start(self.clock, steps=60, resumed_step=resumed),
            *self.steps((resumed or 0) + 1, 40),
            synthetic.evaluated(self.clock, 40, of=60, noise=self.noise),
            self.clock.event("stop", 0, step=40, reason="interrupted", detail="Ctrl-C"),
        ]

    def load(self) -> Events:
        return [synthetic.data(self.clock, "train", documents=9), synthetic.model(self.clock, layers=3, experts=4)]

    def steps(self, first: int, last: int) -> Events:
        return list(synthetic.steps(self.clock, first, last, of=60, routing=self.routing, noise=self.noise))


def test_a_finished_run_is_summed_exactly(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=120, layers=12, experts=4)
    report = read(tmp_path, events)
    steps = steps_of(events)
    assert (report.run, report.state, report.steps_done, report.steps_planned) == ("demo", "finished", 120, 120)
    assert report.totals.tokens == sum(step["tokens"] for step in steps)
    assert report.totals.target_tokens == sum(step["target_tokens"] for step in steps)
    assert report.totals.step_s == pytest.approx(sum(step["step_s"] for step in steps))
    assert report.curves.loss.mean == tuple(step["loss"] for step in steps)
    assert report.loads is not None
    assert [list(layer.tokens) for layer in report.loads.layers] == summed(steps)
    assert report.loads.worst.layer == 11
    assert report.loads.layers[11].dead == (3,)
    assert report.loads.layers[10].starved == (1,)
    assert [evaluation.step for evaluation in report.evaluations] == [0, 60, 120]
    assert [data.split for data in report.data] == ["train", "evaluate"]
    assert report.unread == {}
    assert report.run_file == "run: demo\n"


def test_a_load_is_the_share_over_the_fair_share(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=40, layers=2, experts=8)
    loads = read(tmp_path, events).loads
    assert loads is not None
    tokens = summed(steps_of(events))[0]
    assert loads.layers[0].load == pytest.approx([count / sum(tokens) * 8 for count in tokens])
    begin, end = summed(steps_of(events)[:4])[0], summed(steps_of(events)[-4:])[0]
    assert loads.tenth_steps == 4
    assert loads.layers[0].first == pytest.approx([count / sum(begin) * 8 for count in begin])
    assert loads.layers[0].last == pytest.approx([count / sum(end) * 8 for count in end])


def test_a_restart_voids_what_was_done_after_its_checkpoint(tmp_path: Path) -> None:
    log = Restarted(resumed=20)
    report = read(tmp_path, log.first + log.second, after=timedelta(hours=4))
    valid = steps_of(log.first)[:20] + steps_of(log.second)
    assert report.curves.loss.steps == tuple(range(1, 41))
    assert report.curves.loss.mean == tuple(step["loss"] for step in valid)
    assert report.loads is not None
    assert [list(layer.tokens) for layer in report.loads.layers] == summed(valid)
    assert [evaluation.step for evaluation in report.evaluations] == [0, 20, 40]
    assert [save.step for save in report.saves] == [20]
    assert (report.restarts, report.void_steps, report.processes) == ((20,), 10, 2)
    assert report.void_s == pytest.approx(sum(step["step_s"] for step in steps_of(log.first)[20:]))
    assert (report.state, report.detail) == ("interrupted", "Ctrl-C")
    assert [finding.text for finding in report.findings] == ["of the first process", "of every process"]


def test_a_restart_from_nothing_voids_everything_before(tmp_path: Path) -> None:
    log = Restarted(resumed=None)
    report = read(tmp_path, log.first + log.second, after=timedelta(hours=4))
    assert report.curves.loss.mean == tuple(step["loss"] for step in steps_of(log.second))
    assert (report.restarts, report.void_steps) == ((0,), 30)
    assert [evaluation.step for evaluation in report.evaluations] == [40]
    assert report.saves == ()


def test_a_later_restart_may_go_back_further(tmp_path: Path) -> None:
    """The newest checkpoint was damaged, so the third process takes the one before."""
    log = Restarted(resumed=30)
    third = [synthetic.start(log.clock, steps=60, resumed_step=20), *log.steps(21, 25)]
    report = read(tmp_path, log.first + log.second + third, after=timedelta(hours=4))
    valid = steps_of(log.first)[:20] + steps_of(third)
    assert report.curves.loss.mean == tuple(step["loss"] for step in valid)
    assert (report.restarts, report.void_steps) == ((30, 20), 20)


def test_the_time_between_two_processes_is_not_the_runs(tmp_path: Path) -> None:
    """The second process's first words come before its start event, the first was killed without a word."""
    log = Restarted(resumed=20)
    report = read(tmp_path, log.first + log.second, after=timedelta(hours=4))
    pieces = [[datetime.fromisoformat(event["time"]) for event in part] for part in (log.first, log.second)]
    assert report.elapsed_s == pytest.approx(sum((piece[-1] - piece[0]).total_seconds() for piece in pieces))


def test_a_process_that_dies_while_it_loads_is_one_of_its_own(tmp_path: Path) -> None:
    log = Restarted(resumed=20)
    died = log.load()
    log.clock.now += timedelta(hours=1)
    again = [*log.load(), synthetic.start(log.clock, steps=60, resumed_step=40), *log.steps(41, 42)]
    report = read(tmp_path, log.first + log.second + died + again, after=timedelta(hours=6))
    assert (report.processes, report.steps_done, report.restarts) == (4, 42, (20, 40))
    assert report.elapsed_s < 300


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_stop_is_over_when_the_next_process_has_said_a_word(tmp_path: Path, kept: int) -> None:
    log = Restarted(resumed=20)
    third = [log.clock.event("finding", 0, severity="note", text="a word"), *log.load()]
    folder = synthetic.write_run(tmp_path, log.first + log.second + third[:kept])
    report = read_run_folder(folder, now=log.clock.now)
    assert (report.state, report.detail, report.steps_done) == ("running", "", 40)


def test_a_line_cut_by_a_kill_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=20)
    folder = synthetic.write_run(tmp_path, events[:-1])
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"v": 1, "time": "2026-03-01T09:10:00Z", "kind": "step", "st')
    report = read_run_folder(folder, now=synthetic.BEGIN)
    assert (report.steps_done, report.unread) == (20, {"broken line": 1})


def test_strangers_are_skipped_and_counted(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=3)
    step = next(event for event in events if event["kind"] == "step")
    events += [
        {**step, "step": 4, "colour": "blue"},
        {"v": 1, "time": step["time"], "kind": "weather", "rain": True},
        {"v": 1, "time": step["time"], "kind": "save", "step": 4},
        {**step, "v": 2, "step": 5},
        [1, 2],  # type: ignore[list-item]
    ]
    report = read(tmp_path, events)
    assert report.steps_done == 5
    assert report.unread == {
        "unknown field 'colour' of step": 1,
        "unknown kind 'weather'": 1,
        "save event with path: Field required": 1,
        "event of format 2, known is 1": 1,
        "line that is no JSON object": 1,
    }


@pytest.mark.parametrize("written", ["NaN", "null", "Infinity"])
def test_a_loss_that_is_no_number_is_kept_as_such(tmp_path: Path, written: str) -> None:
    events = synthetic.whole_run(total=10)
    steps_of(events)[6]["loss"] = "HERE"
    folder = synthetic.write_run(tmp_path, events)
    path = folder / "events.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"HERE"', written), encoding="utf-8")
    loss = read_run_folder(folder, now=synthetic.BEGIN).curves.loss
    assert loss.not_finite == (7,)
    assert [math.isfinite(value) for value in loss.mean] == [True] * 6 + [False] + [True] * 3


@pytest.mark.parametrize(("after", "state"), [(timedelta(seconds=5), "running"), (timedelta(hours=2), "silent")])
def test_a_run_without_a_stop_works_or_is_silent(tmp_path: Path, after: timedelta, state: str) -> None:
    events = synthetic.whole_run(total=60)[:40]
    folder = synthetic.write_run(tmp_path, events)
    assert read_run_folder(folder, now=datetime.fromisoformat(events[-1]["time"]) + after).state == state


def test_a_stop_is_forgotten_when_another_process_starts(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=10)
    clock = synthetic.Clock()
    events.append(synthetic.start(clock, steps=20, resumed_step=10))
    report = read(tmp_path, events)
    assert (report.state, report.steps_done, report.steps_planned) == ("running", 10, 20)


def test_counts_of_another_shape_are_reported_not_mixed(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=10, layers=2, experts=4)
    steps_of(events)[4]["expert_tokens"] = [[1, 2], [3, 4]]
    report = read(tmp_path, events)
    assert report.unread == {"step whose expert_tokens has another shape than the first": 1}
    assert report.loads is not None
    good = [step for step in steps_of(events) if step["step"] != 5]
    assert [list(layer.tokens) for layer in report.loads.layers] == summed(good)


def test_a_folder_without_events_names_the_runs_beside_it(tmp_path: Path) -> None:
    synthetic.write_run(tmp_path / "runs" / "one", synthetic.whole_run(total=2))
    with pytest.raises(UserError, match=r"events\.jsonl.*Runs in .*runs: .*one"):
        read_run_folder(tmp_path / "runs" / "two")
    with pytest.raises(UserError, match=r"events\.jsonl.*Runs in .*runs: .*one"):
        read_run_folder(tmp_path / "runs")
    with pytest.raises(UserError, match=r"no such folder.*gatewright train"):
        read_run_folder(tmp_path / "elsewhere" / "two")


def test_windows_of_time_are_bounded_and_lose_no_token() -> None:
    loads, noise, total = LoadsInTime(), random.Random(0), Counter[int]()
    for step in range(1, 5001):
        row = [noise.randrange(50) for _ in range(4)]
        total.update(dict(enumerate(row)))
        loads.add(step, [row])
    found = loads.finish([7])
    assert found is not None
    assert found.layers[0].tokens == tuple(total[expert] for expert in range(4))
    assert len(found.window_steps) <= WINDOWS
    assert found.window_steps[-1] == 5000
    assert list(found.window_steps) == sorted(set(found.window_steps))


@pytest.mark.parametrize("length", [0, 1, 599, 600, 601, 12_345])
def test_a_series_is_short_and_keeps_its_spikes(length: int) -> None:
    noise = random.Random(length)
    values = [noise.gauss(1, 0.1) for _ in range(length)]
    if length > 10:
        values[length // 3], values[length // 2], values[7] = 900.0, -50.0, math.nan
    series = reduce(range(1, length + 1), values)
    finite = [value for value in values if math.isfinite(value)]
    assert len(series.steps) <= POINTS
    assert max(series.finite, default=None) == max(finite, default=None)
    assert min(series.finite, default=None) == min(finite, default=None)
    assert series.not_finite == ((8,) if length > 10 else ())
    if length:
        assert series.steps[-1] == length
        assert len(series.steps) == len(series.mean) == len(series.low) == len(series.high)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Ten times the steps, the same peak but for some hundred bytes a step."""

    def peak(steps: int) -> int:
        folder = synthetic.write_run(tmp_path / str(steps), synthetic.whole_run(total=steps, layers=4, experts=32))
        tracemalloc.start()
        read_run_folder(folder, now=synthetic.BEGIN)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    assert peak(1000) - peak(100) < 900 * 400 + WINDOWS * 4 * 32 * 40


def test_wilson_interval_matches_published_values() -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20 and 1 of 29."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
