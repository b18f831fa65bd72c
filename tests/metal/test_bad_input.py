"""Whatever a user gets wrong ends in one clear message and the right exit code, before step 1, without a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from rich.console import Console

from gatewright.spec.errors import CheckpointError, DataError, ModelError, RunFileError, UserError
from gatewright.spec.read import dump_run, read_run
from gatewright.spec.run import Run
from gatewright.train import loop

Break = Callable[[Path, Run], None]


def write(name: str, text: str) -> Break:
    return lambda folder, run: (folder / name).write_text(text, encoding="utf-8") and None


def row(**values: object) -> str:
    return json.dumps(values) + "\n"


def chat(*turns: tuple[str, str]) -> str:
    return row(messages=[{"role": role, "content": content} for role, content in turns])


GOOD = chat(("user", "1 and 1"), ("assistant", "2"))


def edit_json(name: str, **changes: object) -> Break:
    def change(folder: Path, run: Run) -> None:
        file = Path(run.model.path) / name
        values = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in (values | changes).items() if v is not None}))

    return change


def drop_template(folder: Path, run: Run) -> None:
    (Path(run.model.path) / "chat_template.jinja").unlink(missing_ok=True)
    edit_json("tokenizer_config.json", chat_template=None)(folder, run)


def drop_weights(folder: Path, run: Run) -> None:
    (Path(run.model.path) / "model.safetensors").unlink()


def name_a_missing_shard(folder: Path, run: Run) -> None:
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (Path(run.model.path) / "model.safetensors.index.json").write_text(json.dumps(index))


CASES: dict[str, tuple[Break, type[UserError], str]] = {
    "missing file": (lambda folder, run: (folder / "train.jsonl").unlink(), DataError, r"train\.jsonl: no such file"),
    "empty file": (write("train.jsonl", ""), DataError, r"train\.jsonl"),
    "broken line": (write("train.jsonl", GOOD + '{"messages": [{"role": "us'), DataError, r"train\.jsonl:2"),
    "no messages": (write("train.jsonl", GOOD + row(question="a", answer="b")), DataError, r"train\.jsonl:2.*question"),
    "all masked": (
        write("train.jsonl", chat(("user", "hello")) * 3),
        DataError,
        r"any of its 3 rows, so all labels are masked",
    ),
    "too long": (
        write("train.jsonl", GOOD + chat(("user", "word " * 100), ("assistant", "yes"))),
        RunFileError,
        r"train\.micro_batch_tokens = 200 cannot hold the longest document of \d+ tokens",
    ),
    "no template": (drop_template, DataError, r"data\.chat_template"),
    "no weights": (drop_weights, ModelError, r"no model\.safetensors and no model\.safetensors\.index\.json"),
    "missing shard": (name_a_missing_shard, ModelError, r"2 of 2 weight files are missing"),
    "no config": (lambda folder, run: (Path(run.model.path) / "config.json").unlink(), ModelError, r"no config\.json"),
    "truncated config": (
        lambda folder, run: (Path(run.model.path) / "config.json").write_text('{"model_ty') and None,
        ModelError,
        r"config\.json: not readable as JSON",
    ),
    "unknown architecture": (
        edit_json("config.json", model_type="gpt9"),
        ModelError,
        r"does not know this architecture",
    ),
    "other shapes": (
        edit_json("config.json", hidden_size=64),
        ModelError,
        r"\d+ weights have another shape than config\.json says, the first is ",
    ),
    "small vocabulary": (edit_json("config.json", vocab_size=40), DataError, r"40"),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_input(tmp_path: Path, name: str) -> None:
    damage, error, message = CASES[name]
    run = tiny.make_run(tmp_path, "qwen3_moe")
    damage(tmp_path, run)
    with pytest.raises(error, match=message) as raised:
        loop.train(run, console=Console(quiet=True))
    assert raised.value.exit_code == 2
    assert not (run.folder / "checkpoints").exists() and not (run.folder / "adapter").exists()
    [stop] = tiny.events(run, "stop")
    assert stop["reason"] == "failed" and stop["detail"] == str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router__bias_rate": 1e-3}, "have no e_score_correction_bias to move"),
        ({"parallel": {"ep": 2}}, "needs several ranks, and this is one process"),
        (
            {"train__micro_batch_tokens": 4000},
            r"train\.micro_batch_tokens = 4,000 is more than train\.tokens_per_step = 400",
        ),
        ({"method__adapter__targets": ["shared_experts"]}, "'shared_experts' matches no weight of this model"),
        ({"data__max_tokens": 20}, "longer than data.max_tokens = 20"),
        ({"runs_dir": "/proc/nowhere"}, "cannot be written"),
    ],
)
def test_settings_that_cannot_be_honoured(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loop.train(tiny.make_run(tmp_path, "qwen3_moe", **changes), console=Console(quiet=True))


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", router__guard={"action": ["freeze"]})
    console = Console(record=True, width=200)
    assert loop.train(run, console=console) == 0
    wanted = "router.guard: freeze will change nothing"
    assert f"note: {wanted}" in console.export_text()
    assert any(wanted in str(event["text"]) for event in tiny.events(run, "finding"))


def test_dropout_inside_attention_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama")
    config = Path(run.model.path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
    with pytest.raises(UserError, match=r"attention_dropout = 0\.1"):
        loop.train(run, console=Console(quiet=True))


def test_the_command_line_shows_no_traceback(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe")
    (tmp_path / "run.yaml").write_text(dump_run(run))
    (tmp_path / "train.jsonl").write_text(GOOD + "{broken\n")
    command = [sys.executable, "-m", "gatewright", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "train.jsonl:2" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_fills_up_while_saving(tmp_path: Path) -> None:
    """The save fails with a clear message, the last complete checkpoint stays, and with room the run goes on."""
    disk = tmp_path / "runs"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode()}")
    try:
        run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=6, train__save_every_steps=1, train__keep_checkpoints=9)
        with pytest.raises(
            CheckpointError, match=r"not saved \(.*[Nn]o space.*Earlier checkpoints are untouched"
        ) as raised:
            loop.train(run, console=Console(quiet=True))
        assert raised.value.exit_code == 1
        kept = sorted(p.name for p in (run.folder / "checkpoints").iterdir())
        assert kept and all(name.startswith("step-") for name in kept)
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert loop.train(run, console=Console(quiet=True)) == 0
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # token files may still be mapped
    undisturbed = tiny.make_run(tmp_path, "qwen3_moe", run="other", train__steps=6)
    assert loop.train(undisturbed, console=Console(quiet=True)) == 0


def test_a_resolved_run_file_reads_back(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama")
    assert loop.train(run, console=Console(quiet=True)) == 0
    assert read_run(run.folder / "run.yaml") == run
