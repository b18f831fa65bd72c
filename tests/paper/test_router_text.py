"""What `router` prints and answers: golden, narrow, the answer first; and every wrong question in one sentence."""

import json
import sys
from pathlib import Path

import pytest

from gatewright.cli import main
from gatewright.router.blocks import read_record
from gatewright.router.capacity import Question, estimate_capacity, estimate_drop
from gatewright.router.placement import contiguous, place, worst_rank_loads
from gatewright.router.text import WIDTH, capacity_text, measure_text, placement_text

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = Path(__file__).with_name("routing_python.npz")


def capacity() -> str:
    record, question = read_record(RECORDED), Question(tokens=8192)
    asked = (1.25, *estimate_drop(record, question, 1.25))
    return capacity_text(estimate_capacity(record, question), question, experts=record.experts, asked=asked)


def capacity_beyond() -> str:
    record, question = read_record(RECORDED), Question(tokens=65536, documents=2, ep=8, per="rank")
    return capacity_text(estimate_capacity(record, question), question, experts=record.experts)


def placement() -> str:
    record = read_record(RECORDED)
    loads = record.loads().tolist()
    before = worst_rank_loads(contiguous(layers=4, experts=16, ep=8), loads)
    after = worst_rank_loads(place(loads, ep=8), loads)
    return placement_text(record.layers, before, after, after, ep=8, documents=record.documents)


def measured() -> str:
    return measure_text(read_record(RECORDED), path="runs/judge/routing.npz")


GOLDENS = {
    "router_capacity.txt": capacity,
    "router_capacity_beyond.txt": capacity_beyond,
    "router_placement.txt": placement,
    "router_measure.txt": measured,
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_the_page_is_as_it_was_and_narrow(name: str) -> None:
    text = GOLDENS[name]()
    assert text + "\n" == (GOLDEN / name).read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= WIDTH


def gatewright(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed to the screen."""
    monkeypatch.setattr(sys, "argv", ["gatewright", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def test_capacity_as_json_is_the_estimate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = gatewright(
        monkeypatch, capsys, "router", "capacity", str(RECORDED), "--tokens", "8192", "--ep", "8", "--per", "rank",
        "--documents-per-micro-batch", "2", "--drop", "0.02", "--factor", "1.25", "--json",
    )  # fmt: skip
    answer = json.loads(text)
    question = Question(tokens=8192, documents=2, ep=8, per="rank", drop=0.02)
    estimate = estimate_capacity(read_record(RECORDED), question)
    assert code == 0
    assert answer["question"] == {"tokens": 8192, "packed": False, "documents": 2, "ep": 8, "per": "rank", "drop": 0.02}
    assert (answer["upper"], answer["factor"], answer["floor"]) == (estimate.upper, estimate.factor, estimate.floor)
    assert len(answer["layers"]) == 4
    assert answer["asked"]["factor"] == 1.25


def test_a_run_folder_and_its_run_file_lead_to_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "judge"
    folder.mkdir(parents=True)
    (folder / "routing.npz").write_bytes(RECORDED.read_bytes())
    run_file = tmp_path / "judge.yaml"
    run_file.write_text(
        "run: judge\nmodel: {path: m}\ndata: {train: d}\ntrain: {tokens_per_step: 8, steps: 1, lr: 1e-3}\n"
        f"runs_dir: {tmp_path / 'runs'}\n"
    )
    answers = []
    for source in (RECORDED, folder, run_file):
        code, text = gatewright(monkeypatch, capsys, "router", "placement", str(source), "--ep", "8", "--json")
        answers.append(json.loads(text))
        assert code == 0
    assert answers[0] == answers[1] == answers[2]
    assert [sorted(row["order"]) for row in answers[0]["layers"]] == [list(range(16))] * 4
    assert all(row["placed"] <= row["contiguous"] for row in answers[0]["layers"])
    (folder / "routing.npz").unlink()
    code, text = gatewright(monkeypatch, capsys, "router", "placement", str(run_file), "--ep", "8")
    assert (code, "`gatewright router measure RUN.yaml` writes one" in text) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["capacity", str(RECORDED), "--tokens", "8192", "--ep", "3"],
            "ep = 3 does not divide 16 experts; use one of",
        ),
        (["capacity", str(RECORDED), "--tokens", "8192", "--drop", "1.5"], "drop = 1.5; wanted a share above 0"),
        (["capacity", str(RECORDED), "--tokens", "8192", "--drop", "nan"], "drop = nan; wanted a share above 0"),
        (
            ["capacity", str(RECORDED), "--tokens", "8000", "--packed"],
            "too few documents: 0 of 80 fit into 8,000 tokens",
        ),
        (["capacity", str(RECORDED), "--tokens", "64"], "routing was recorded in blocks of 128; wanted as many"),
        (["capacity", str(RECORDED), "--tokens", "8192", "--factor", "-1"], "factor = -1; wanted more than 0"),
        (["capacity", "missing.npz", "--tokens", "8192"], "missing.npz: no such file"),
        (["capacity", "missing.yaml", "--tokens", "8192"], "missing.yaml: no such file"),
        (["placement", str(RECORDED), "--ep", "5"], "ep = 5 does not divide 16 experts"),
        (["placement", __file__, "--ep", "2"], "test_router_text.py"),
    ],
)
def test_a_wrong_question_is_answered_in_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = gatewright(monkeypatch, capsys, "router", *arguments)
    assert code == 2
    assert words in text
    assert "Traceback" not in text
