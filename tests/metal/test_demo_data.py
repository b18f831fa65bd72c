"""The demo's data: right answers by their generators' own scorers, and no held-out question in training."""

import importlib.util
import json
import statistics
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="needs: pip install 'gatewright[demo]'")

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "make_data.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


make_data = load_script()


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Any]]:
    asked: set[str] = set()
    return {split: list(make_data.draw(split, asked)) for split in ("heldout", "train")}


def questions(pairs: list[Any]) -> list[str]:
    return [make_data.chat(entry)["messages"][1]["content"] for _, entry in pairs]


def test_every_family_gives_the_rows_it_promises(drawn: dict[str, list[Any]]) -> None:
    for split, pairs in drawn.items():
        promised = Counter()
        for family in make_data.FAMILIES:
            promised[family.generator] += family.rows[split]
        assert Counter(entry["metadata"]["source_dataset"] for _, entry in pairs) == promised


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_generators_own_scorer_accepts_every_answer(split: str, drawn: dict[str, list[Any]]) -> None:
    for dataset, entry in drawn[split]:
        answer = make_data.chat(entry)["messages"][2]["content"]
        assert dataset.score_answer(answer, entry) == 1.0
        assert dataset.score_answer(answer + " not", entry) < 1.0
        assert answer == answer.strip() != ""


def test_no_question_is_asked_twice_not_even_across_the_split(drawn: dict[str, list[Any]]) -> None:
    train, heldout = questions(drawn["train"]), questions(drawn["heldout"])
    assert set(train).isdisjoint(heldout)
    assert len(set(train)) == len(train) and len(set(heldout)) == len(heldout)


def test_a_question_already_asked_is_not_drawn(drawn: dict[str, list[Any]]) -> None:
    asked = {entry["question"] for _, entry in drawn["train"]}
    again = [entry["question"] for _, entry in make_data.draw("train", set(asked))]
    assert len(again) == len(drawn["train"]) and asked.isdisjoint(again)


def test_the_splits_draw_from_seeds_that_never_meet() -> None:
    """Row i comes from seed + i: neighbouring seeds would give the same rows, shifted by one."""
    ranges = sorted(
        (first + index * make_data.SEEDS_A_FAMILY, first + (index + 1) * make_data.SEEDS_A_FAMILY)
        for first in make_data.FIRST_SEED.values()
        for index in range(len(make_data.FAMILIES))
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def test_lengths_have_a_long_tail(drawn: dict[str, list[Any]]) -> None:
    characters = [len(question) for question in questions(drawn["train"])]
    assert max(characters) > 8 * statistics.median(characters)


def test_the_same_files_are_written_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        monkeypatch.setattr(make_data, "FOLDER", folder)
        make_data.main()
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["heldout.jsonl", "train.jsonl"]
    rows = [json.loads(line) for line in written[0]["heldout.jsonl"].splitlines()]
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant"]
