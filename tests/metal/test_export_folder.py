"""What lies beside exported files, and the command line: cards, Modelfile, what fits, FP8 bases, damaged files."""

import json
import shutil
from pathlib import Path

import export_models
import fp8_made
import gguf
import numpy as np
import pytest
import test_export_gguf as whole
import tiny
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gatewright.cli import app
from gatewright.export.card import modelfile
from gatewright.export.verify import judge
from gatewright.export.weights import worst_weight
from gatewright.train.loop import train


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Mixtral, an adapter of its experts, and its export; not to be changed."""
    folder = tmp_path_factory.mktemp("folder")
    whole.make(folder, "mixtral")
    (folder / "base" / "README.md").write_text("---\nlicense: Apache-2.0\n---\n")
    (folder / "base" / "NOTICE").write_text("theirs")
    assert whole.run(folder, "q4_k_m").passed
    return folder


def scrambled(good: Path, bad: Path, *, expert: int, tensor: str = "blk.1.ffn_down_exps.weight") -> Path:
    """The file with the rows of one expert's matrix in another order: each block is sound, the matrix is not."""
    shutil.copyfile(good, bad)
    [stack] = [t for t in gguf.GGUFReader(bad, "r+").tensors if t.name == tensor]
    stack.data[expert] = np.random.default_rng(0).permutation(stack.data[expert])
    stack.data.flush()
    return bad


def test_a_scrambled_expert_of_a_quantised_file_fails(exported: Path, tmp_path: Path) -> None:
    out = exported / "out"
    good = out / "adapter-of-it-Q4_K_M.gguf"
    assert judge(good, out, threads=1)["passed"]
    bad = scrambled(good, tmp_path / good.name, expert=2)
    verdict = judge(bad, out, threads=1)
    [failed] = [gate["name"] for gate in verdict["gates"] if not gate["passed"]]
    assert not verdict["passed"] and failed == "bytes other than those exported (sha256)"


def test_a_scrambled_expert_is_found_without_a_token(exported: Path, tmp_path: Path) -> None:
    source = exported / "out" / "work" / "tuned-F16.gguf"
    good = exported / "out" / "work" / "tuned-Q4_K_M.gguf"
    sound = worst_weight(good, source)
    assert 0.02 < sound.error < 0.15
    for expert in range(4):
        found = worst_weight(scrambled(good, tmp_path / f"{expert}.gguf", expert=expert), source)
        assert (found.tensor, found.expert) == ("blk.1.ffn_down_exps.weight", expert)
        assert found.error > 1.0
    [entry] = json.loads((exported / "out" / "manifest.json").read_text())["files"]
    [gate] = [gate for gate in entry["gates"] if gate["name"].startswith("largest error of a weight")]
    assert gate["value"] == pytest.approx(sound.error) and gate["passed"]


def test_a_file_damaged_between_steps_is_published_as_failed(exported: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(exported, tmp_path / "mine"))
    file = mine / "out" / "work" / "tuned-Q4_K_M.gguf"
    scrambled(file, tmp_path / "bad.gguf", expert=0)
    shutil.copyfile(tmp_path / "bad.gguf", file)
    assert not whole.run(mine, "q4_k_m").passed
    assert (mine / "out" / "adapter-of-it-Q4_K_M.failed.gguf").is_file()
    assert not (mine / "out" / "adapter-of-it-Q4_K_M.gguf").exists()
    assert not judge(mine / "out" / "adapter-of-it-Q4_K_M.failed.gguf", mine / "out", threads=1)["passed"]


def test_an_fp8_base_is_exported_as_what_it_stands_for(tmp_path: Path) -> None:
    export_models.save_base("qwen3_moe", tmp_path / "plain")
    fp8_made.save_fp8(tmp_path / "plain", tmp_path / "base", block=(128, 128))
    whole.export_models.save_adapter(
        tmp_path / "base" / "dense", tmp_path / "adapter-of-it", **export_models.EXPERTS_TOO
    )
    config = tmp_path / "adapter-of-it" / "adapter_config.json"
    stated = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    config.write_text(json.dumps(stated))
    export_models.save_rows(tmp_path / "train.jsonl", 40)
    export_models.save_rows(tmp_path / "heldout.jsonl", 30, seed=5)
    outcome = whole.run(tmp_path, "f16")
    assert outcome.passed and outcome.manifest["merge_proof"]["median_kl"] < 1e-6
    merged = load_file(tmp_path / "out" / "work" / "merged" / "model.safetensors")
    dense = load_file(tmp_path / "out" / "work" / "dense" / "model.safetensors")
    meant = load_file(tmp_path / "base" / "dense" / "model.safetensors")
    assert dense.keys() == meant.keys() == merged.keys(), "no scales are left"
    assert all((dense[name] == meant[name]).all() for name in meant)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert not (merged[name] == meant[name]).all()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "work" / "merged" / "config.json").read_text())


def test_the_card_of_a_run(tmp_path: Path) -> None:
    """From a finished run by name of its folder: training, files, licence, with no path of this machine."""
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=2)
    assert train(run, console=Console(quiet=True)) == 0
    base = Path(run.model.path)
    (base / "PROVENANCE.json").write_text(json.dumps({"origin": "somebody/tiny-moe", "licence": "MIT"}))
    result = CliRunner().invoke(
        app, ["export", str(run.folder), "--to", "merged", "--out", str(tmp_path / "out"), "--dtype", "bf16"]
    )
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nbase_model: somebody/tiny-moe\nlibrary_name: transformers\n---\n")
    assert "Its licence (MIT) holds for this model too." in card and str(tmp_path) not in card
    for row in ("| architecture | Qwen3MoeForCausalLM |", "| steps | 2 |", "| data | train.jsonl |"):
        assert row in card
    assert "merged in float32" in card


def test_the_card_of_files_and_what_is_copied(exported: Path) -> None:
    card = (exported / "out" / "README.md").read_text()
    manifest = json.loads((exported / "out" / "manifest.json").read_text())
    [entry] = manifest["files"]
    [row] = [line for line in card.splitlines() if line.startswith("| adapter-of-it-Q4_K_M.gguf")]
    figures, floor = entry["figures"], entry["base_figures"]
    assert f"{figures['kl_mean']:.2g} ({floor['kl_mean']:.2g})" in row and row.endswith("passed |")
    assert "license: apache-2.0\n" in card and "used 8 of 8 routed experts" in card
    assert (exported / "out" / "NOTICE").read_text() == "theirs"
    assert str(exported) not in card


def test_the_modelfile(exported: Path) -> None:
    text = (exported / "out" / "Modelfile").read_text()
    assert text.startswith("FROM ./adapter-of-it-Q4_K_M.gguf\nTEMPLATE ")
    assert "<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>" in text
    assert 'PARAMETER stop "<|im_end|>"\n' in text and text.endswith("PARAMETER num_ctx 4096\n")
    other = modelfile("x.gguf", adapter="a.gguf", chat_template="[INST]", stops=[], context_tokens=8)
    assert other == "FROM ./x.gguf\nADAPTER ./a.gguf\nPARAMETER num_ctx 8\n"


def test_what_fits_is_told(exported: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(exported, tmp_path / "mine"))
    command = [
        "export", str(mine / "adapter-of-it"), "--base", str(mine / "base"), "--data", str(mine / "train.jsonl"),
        "--quant", "q8_0", "--out", str(tmp_path / "out"), "--check-tokens", "200", "--calibration-tokens", "100",
        "--threads", "1", "--context-tokens", "512",
    ]  # fmt: skip
    roomy = CliRunner().invoke(app, [*command, "--device-memory", "24GiB"], env={"COLUMNS": "200"})
    assert ", fits" in roomy.output, roomy.output
    tight = CliRunner().invoke(app, [*command, "--device-memory", "9MB"], env={"COLUMNS": "200"})
    assert ", too large" in tight.output, tight.output
    wrong = CliRunner().invoke(app, [*command, "--device-memory", "24 apples"])
    assert wrong.exit_code != 0 and "24 apples" in str(wrong.exception or wrong.output)


def test_another_base_is_refused_on_the_command_line(exported: Path, tmp_path: Path) -> None:
    other = export_models.save_base("mixtral", tmp_path / "other", seed=9)
    config = json.loads((other / "config.json").read_text())
    wide = load_file(other / "model.safetensors")
    save_file({k: v.repeat(2, *[1] * (v.dim() - 1)) if "q_proj" in k else v for k, v in wide.items()},
              other / "model.safetensors", {"format": "pt"})  # fmt: skip
    (other / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "head_dim": 64}))
    result = CliRunner().invoke(
        app, ["export", str(exported / "adapter-of-it"), "--base", str(other), "--to", "merged", "--out",
              str(tmp_path / "out")],
    )  # fmt: skip
    assert result.exit_code != 0 and "made for another model" in str(result.exception or result.output)
    assert not (tmp_path / "out" / "manifest.json").exists()
