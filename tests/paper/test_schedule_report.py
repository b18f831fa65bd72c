"""The simulation of steps, its text and picture, and files of lengths, good and bad."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from gatewright.cli import app
from gatewright.packing.cost import cost_model, find_rates
from gatewright.packing.lengths_file import read_lengths
from gatewright.packing.lengths_page import lengths_page
from gatewright.packing.simulate import simulate, step_bounds
from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.report.schedule_picture import LEFT, RIGHT, picture
from gatewright.report.schedule_text import render_schedule
from gatewright.spec.errors import DataError, UserError

LENGTHS = np.clip(np.random.default_rng(3).lognormal(np.log(700), 1.4, 3000), 16, 60_000).astype(np.int64)
COSTS = cost_model(find_shape("Qwen3-30B-A3B"), find_rates(find_gpu("h200")))


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture
def file(tmp_path):
    (tmp_path / "lengths.txt").write_text("".join(f"{n}\n" for n in LENGTHS))
    return tmp_path / "lengths.txt"


def test_times_of_ranks_made_from_slices_are_the_times_that_schedules_are_scored_by():
    in_file, steps = simulate(LENGTHS, ranks=16, capacity=4096, costs=COSTS, tokens_per_step=250_000, steps=3)
    assert in_file == len(list(step_bounds(LENGTHS, 250_000))) and len(steps) == 3
    for step in steps:
        assert sum(slot.duration_s for slot in step.slots) == pytest.approx(step.step_s)
        assert sum(slot.tokens for slot in step.slots) == step.tokens
        assert 0 <= step.idle < 0.3 and 0 < step.exchange < 0.2
        assert step.bound_s < step.step_s <= min(seconds for _, seconds in step.candidates)
        assert step.exchanged_bytes % COSTS.exchange_bytes == 0 < step.exchanged_bytes


def test_steps_hold_every_document_once_and_no_more_tokens_than_asked():
    bounds = list(step_bounds(LENGTHS, 100_000))
    assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert bounds[0][0] == 0 and bounds[-1][1] == len(LENGTHS)
    assert all(LENGTHS[start:end].sum() <= 100_000 for start, end in bounds)
    assert list(step_bounds(np.array([5, 200, 5]), 100)) == [(0, 1), (1, 2), (2, 3)], "a document longer than a step"


def test_text(file):
    text = run("data", "schedule", file, "--world", 16, "--gpu", "h200", "--steps", 2, "--tokens-per-rank", 4096)
    assert max(map(len, text.splitlines())) <= 100
    first = text.splitlines()[0]
    assert "× as fast as static CP" in first and "above perfect balance" in first
    for needed in (
        "3,000 documents",
        "16 × h200, 8 a node, 4,096 tokens a rank",
        "mixed CP",
        "perfect balance",
        "idle",
    ):
        assert needed in text
    other = run("data", "schedule", file, "--world", 12, "--gpu", "a100-80gb", "--model", "Llama-3.1-8B", "--steps", 1)
    assert "Llama-3.1-8B" in other and "scaled from h200" in other


def test_json_and_picture(file, tmp_path):
    options = ("--world", 16, "--gpu", "h200", "--steps", 1, "--png", tmp_path / "out.png", "--json")
    found = json.loads(run("data", "schedule", file, *options))
    assert found["steps"][0]["candidates"]["mixed CP"] >= found["bound_s"] > 0
    assert found["static"]["step_s"] >= found["step_s"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def report_of(ranks):
    from gatewright.spec.schedule import ScheduleReport

    in_file, steps = simulate(LENGTHS, ranks=ranks, capacity=8192, costs=COSTS, tokens_per_step=400_000, steps=1)
    return ScheduleReport(
        source="lengths.txt", documents=3000, tokens=int(LENGTHS.sum()), empty_documents=2, longest_tokens=60_000,
        model="Qwen3-30B-A3B", model_is_default=False, gpu="h200", rates_source="assumed", ranks=ranks,
        ranks_per_node=8, capacity_tokens=8192, capacity_is_default=True, steps_in_file=in_file, steps=tuple(steps),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [8, 12, 64])
def test_the_picture_draws_each_rank_for_as_long_as_it_is_busy(ranks):
    report = report_of(ranks)
    drawn = picture(report)
    scale = (RIGHT - LEFT) / report.steps[0].step_s
    busy = sum(rank.busy_s for slot in report.steps[0].slots for rank in slot.ranks)
    colours = {"#5b9bd5", "#1d5fa6", "#b4450b"}
    bars = [box for box in drawn.boxes if box.colour in colours and box.top < drawn.height - 50]
    assert sum(box.right - box.left for box in bars) == pytest.approx(busy * scale, rel=1e-6)
    assert all(0 <= box.left <= box.right <= drawn.width and box.bottom <= drawn.height for box in drawn.boxes)
    assert len([word for word in drawn.words if word.text == "rank 0"]) == 1


def test_a_report_without_a_static_candidate_says_what_it_knows():
    report = report_of(8)
    step = replace(report.steps[0], candidates=(("mixed CP", report.steps[0].step_s),))
    text = render_schedule(replace(report, steps=(step,)))
    assert text.splitlines()[0].endswith("above perfect balance") and "2 empty ones left out" in text


def test_lengths_of_a_file(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("\ufeff12\n\n 7 \r\n0\n300\n", encoding="utf-8")
    lengths, empty = read_lengths(path)
    assert lengths.tolist() == [12, 7, 300] and empty == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("12\nabc\n", r"lengths:2: got 'abc'; wanted a whole number of tokens"),
        ("12\n3.5\n", r"lengths:2: got '3.5'"),
        ("-4\n", r"lengths:1: got '-4'"),
        ("5\n99999999999999999999999\n", r"lengths:2: got '9+'"),
        ("5\n9999999999999\n", r"lengths:2: got '9+'"),
        ("12 13\n", r"lengths:1: got '12 13'"),
        ("", "no lengths in it"),
        ("0\n0\n", "every document in it is empty, 2 lines of 0"),
    ],
)
def test_files_that_are_no_lengths(tmp_path, text, says):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(DataError, match=says):
        read_lengths(tmp_path / "lengths")


def test_other_files_that_are_no_lengths(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01\x80")
    with pytest.raises(DataError, match="no text"):
        read_lengths(tmp_path / "binary")
    with pytest.raises(DataError, match="cannot be read"):
        read_lengths(tmp_path / "missing")


def test_a_document_that_all_ranks_cannot_hold(file):
    file.write_text("5\n0\n70000\n900\n")
    with pytest.raises(DataError) as caught:
        run("data", "schedule", file, "--world", 4, "--gpu", "h200", "--tokens-per-rank", 1000)
    text = str(caught.value)
    assert f"{file}:3: 70,000 tokens, with 6.4 GiB of keys and values, more than all 4 ranks can hold" in text
    assert "--tokens-per-rank 17500 or --world 70" in text
    assert "4 × h200" in run("data", "schedule", file, "--world", 4, "--gpu", "h200"), "the default makes room"


def test_documents_need_a_model(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="give --model FOLDER"):
        run("data", "schedule", tmp_path / "chat.jsonl", "--world", 2, "--gpu", "cpu")
    assert "--model" in run("data", "inspect", tmp_path / "chat.jsonl")


def test_the_page_of_a_file_of_lengths(file):
    text = run("data", "inspect", file, "--capacity", 65536, "--max-tokens", "p98")
    assert max(map(len, text.splitlines()[1:])) <= 100
    for needed in ("documents", "3,000", "p50 ", "padding", "Packing into micro-batches of 65,536 tokens", "p98 = "):
        assert needed in text
    priced = run("data", "inspect", file, "--model", "Llama-3.1-8B")
    assert "attention costs as much as all the rest" in priced


def test_losses_of_limits_are_the_tokens_beyond_them():
    page = lengths_page(np.array([10, 20, 30, 40]), source="x", max_tokens=15)
    (line,) = [line for line in page.splitlines() if line.strip().startswith("15 ") and line.count("%") == 2]
    assert line.split() == ["15", "3", "45", "(45.0%)", "4", "90", "(90.0%)"]
    with pytest.raises(DataError, match="'p101'"):
        lengths_page(np.array([1, 2]), source="x", max_tokens="p101")
    assert "tokens" in lengths_page(np.array([1]), source="one token")
