"""Runs as text: the resolved file, the differences between two, the JSON Schema, and the table of keys behind them."""

import json
import re
from pathlib import Path

import pytest

from gatewright.spec.keys import FOREIGN_NAMES, nearest, run_keys, suggest
from gatewright.spec.read import diff_runs, dump_run, json_schema, read_run
from gatewright.spec.run import Adapter, Data, Evaluate, Method, Model, Parallel, Run, Train

SMALL = Run(run="a", model=Model(path="m"), data=Data(train="d"), train=Train(tokens_per_step=8, steps=1, lr=1e-3))
FULL = SMALL.model_copy(
    update={
        "method": Method(adapter=Adapter(rank=8, alpha=16)),
        "evaluate": Evaluate(data="h", every_steps=5),
        "parallel": Parallel(ep=8, cp="dynamic"),
        "track": ["wandb", "mlflow"],
    }
)


def reread(run: Run, folder: Path) -> Run:
    path = folder / "run.yaml"
    path.write_text(dump_run(run), encoding="utf-8")
    return read_run(path)


@pytest.mark.parametrize("run", [SMALL, FULL], ids=["small", "full"])
def test_the_resolved_run_reads_back_as_itself(tmp_path: Path, run: Run) -> None:
    assert reread(run, tmp_path) == run


def test_the_resolved_run_is_in_declared_order_and_holds_every_default() -> None:
    dumped = dump_run(SMALL)
    assert re.findall(r"^(\w+):", dumped, flags=re.MULTILINE) == list(Run.model_fields)
    assert "  eps: 1.0e-08\n" in dumped
    assert "  betas: [0.9, 0.999]\n" in dumped


@pytest.mark.parametrize(
    "text",
    [
        *("1e-5", "no", "On", "null", "~", "true", "0x1f", "1_000", "9" * 5000, "a" * 300, "é", "😀"),
        *(" a ", "a: b", "# a", "- a", "*a", "&a", "!!str a", "[a]", "{a: b}", "@a", "%a", "'", '"'),
        *("x\ny", "\t", "\u2028", "\x7f"),
    ],
)
def test_any_text_survives_being_written_and_read(tmp_path: Path, text: str) -> None:
    run = SMALL.model_copy(update={"data": Data(train=text)})
    assert reread(run, tmp_path) == run


@pytest.mark.parametrize("number", [1e-5, 2e-4, 1e22, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308])
def test_any_number_survives_being_written_and_read(tmp_path: Path, number: float) -> None:
    run = SMALL.model_copy(update={"train": SMALL.train.model_copy(update={"lr": number})})
    assert reread(run, tmp_path) == run


def test_differences_are_named_by_dotted_key() -> None:
    other = SMALL.model_copy(update={"train": Train(tokens_per_step=8, epochs=2, lr=1e-4), "track": ["wandb"]})
    assert diff_runs(SMALL, other) == [
        ("train.steps", 1, None),
        ("train.epochs", None, 2),
        ("train.lr", 1e-3, 1e-4),
        ("track", [], ["wandb"]),
    ]
    assert diff_runs(FULL, FULL) == []


def test_a_section_that_one_run_lacks_is_one_difference() -> None:
    keys = [key for key, _, _ in diff_runs(SMALL, FULL)]
    assert keys == ["method.adapter", "evaluate", "parallel", "track"]


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    json.dumps(schema)
    undescribed = [key.path for key in run_keys().values() if not key.doc and key.path and not key.path.endswith("*")]
    assert undescribed == []
    assert schema["additionalProperties"] is False
    assert schema["properties"]["run"]["description"].startswith("Name of the run")


def test_names_of_other_trainers_lead_to_keys_that_exist() -> None:
    assert {ours for ours in FOREIGN_NAMES.values() if ours not in run_keys()} == set()
    assert {theirs for theirs in FOREIGN_NAMES if theirs in run_keys()} == set()


def test_the_nearest_word_ignores_case_and_dashes() -> None:
    assert nearest("Save-Every-Steps", ["steps", "save_every_steps"]) == "save_every_steps"
    assert nearest("zzz", ["steps"]) is None


def test_a_suggestion_says_which_key_it_leads_to() -> None:
    assert suggest("train", "leraning_rate")[1] is None
    assert suggest("train", "tokens_per_stpe")[1] == "train.tokens_per_step"
    assert suggest("data", "lora_r")[1] == "method.adapter.rank"


@pytest.mark.parametrize(
    ("adapter", "scale"),
    [(Adapter(rank=8), 2.0), (Adapter(rank=8, alpha=8), 1.0), (Adapter(rank=16, alpha=32, rslora=True), 8.0)],
)
def test_the_scale_of_an_adapter(adapter: Adapter, scale: float) -> None:
    assert adapter.scale == scale
