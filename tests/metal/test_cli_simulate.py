"""`gatewright plan --simulate`: the rehearsal behind the verb, for a question in words and for a run file."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gatewright.cli import main

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip
RUN = """\
run: a
model: {path: tiny, dtype: float32}
method: {adapter: {rank: 4, targets: [attention]}}
data: {train: none.jsonl}
train: {tokens_per_step: 256, micro_batch_tokens: 128, steps: 1, lr: 1.0e-4}
"""
WORDS = ("tiny", "--tokens", "128", "--document-tokens", "60", "--rank", "4")
Plan = Callable[..., tuple[object, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the verb in a folder with a tiny model and a run file: (exit code, standard output, standard error)."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["gatewright", "plan", *arguments, "--simulate"])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.parametrize(("arguments", "documents"), [(WORDS, 3), (("run.yaml",), 1)])
def test_the_peak_is_in_the_first_line(plan: Plan, arguments: tuple[str, ...], documents: int) -> None:
    code, out, err = plan(*arguments)
    assert code == 0, err
    assert out.startswith("peak 0.0") and " GiB allocated, in " in out.splitlines()[0]
    assert f"micro-batch 128 tokens in {documents} document" in out
    assert sorted(path.name for path in Path().rglob("*")) == ["config.json", "run.yaml", "tiny"]


HARDWARE = ("--set", "hardware.gpu=h200", "--set", "hardware.per_node=2", "--set", "hardware.nodes=2")


@pytest.mark.parametrize(
    "arguments",
    [
        (*WORDS, "--gpus", "4", "--parallel", "dense=zero3"),
        ("run.yaml", *HARDWARE, "--set", "parallel.dense=zero3"),
    ],
)
def test_the_layout_is_that_of_the_run_file_or_of_the_words(plan: Plan, arguments: tuple[str, ...]) -> None:
    code, out, err = plan(*arguments)
    assert code == 0, err
    assert "rank 0 of 4 ranks: zero3" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tiny", "--html", "a.html"), "--simulate does not go with --html"),
        (("tiny", "--gpus", "8", "--parallel", "ep=3"), "ep"),
        (("tiny", "--parallel", "ep=2"), "give --gpus too"),
        (("run.yaml", "--gpus", "2"), "write --set hardware.nodes=... instead"),
        (("run.yaml", "--set", "parallel.dense=zero3"), "the run file has no hardware section"),
        (("tiny", "--storage", "fp8"), "--storage does not go with --simulate"),
        (("Qwen3-8", "--tokens", "128"), "Nearest in the catalogue: Qwen3-8B"),
        (("tiny", "--tokens", "0"), "tokens 0: wanted"),
        (("tiny", "--tokens", "1"), "of 2 tokens or more"),
        (("tiny", "--targets", "rooter"), "Known: attention, mlp, experts"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_words(plan: Plan, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "") and says in err and len(err.splitlines()) == 1
