"""From an adapter to a GGUF file that llama.cpp runs: the whole way, again, interrupted, and with what breaks."""

import io
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import export_models
import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from gatewright.export.imatrix import load_importance
from gatewright.export.llama import open_engine
from gatewright.export.pipeline import ExportRequest, Outcome, export
from gatewright.export.quantise import parse_recipes
from gatewright.export.reference import load_reference
from gatewright.export.sample import SampleRequest
from gatewright.export.source import find_source
from gatewright.export.verify import judge
from gatewright.spec.errors import DataError, GatewrightError, ModelError, RunFailed, UserError


def make(folder: Path, kind: str, **settings: object) -> None:
    """A base model, an adapter of it and data, below the folder."""
    export_models.save_base(kind, folder / "base")
    export_models.save_adapter(folder / "base", folder / "adapter-of-it", **(settings or export_models.EXPERTS_TOO))
    export_models.save_rows(folder / "train.jsonl", 40)
    export_models.save_rows(folder / "heldout.jsonl", 30, seed=5)


def run(
    folder: Path,
    quant: str = "f16,q8_0,q4_k_m",
    *,
    to: str = "gguf",
    source: str = "adapter-of-it",
    dtype: torch.dtype = torch.float32,
    said: io.StringIO | None = None,
) -> Outcome:
    sample = SampleRequest(
        train=folder / "train.jsonl", heldout=folder / "heldout.jsonl", template=None, calibration_tokens=300,
        check_tokens=1000, document_tokens=200, prompts=3, answer_tokens=4,
    )  # fmt: skip
    request = ExportRequest(
        source=find_source(str(folder / source), base=None), to=to, recipes=parse_recipes(quant), out=folder / "out",
        dtype=dtype, sample=None if to == "merged" else sample, threads=1,
    )  # fmt: skip
    return export(request, console=Console(file=said or io.StringIO(), width=200))


def files(folder: Path) -> set[str]:
    return {file.name for file in (folder / "out").iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen3-MoE, an adapter of its experts, and its export; not to be changed."""
    folder = tmp_path_factory.mktemp("exported")
    make(folder, "qwen3_moe")
    run(folder)
    return folder


@pytest.fixture
def mine(exported: Path, tmp_path: Path) -> Path:
    """A copy of it, times of files included."""
    return Path(shutil.copytree(exported, tmp_path / "mine"))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "olmoe", "mixtral"])
def test_the_whole_way(tmp_path: Path, kind: str) -> None:
    make(tmp_path, kind, **(export_models.ADAPTED if kind == "qwen3" else export_models.EXPERTS_TOO))
    outcome = run(tmp_path)
    assert outcome.passed, outcome.manifest
    assert outcome.manifest["merge_proof"]["median_kl"] < 1e-6
    exact, eight, four = (entry["figures"] for entry in outcome.manifest["files"])
    assert exact["kl_median"] < 5e-6 < eight["kl_median"] < four["kl_median"]
    assert exact["same_answers"] == exact["answers"] == 3
    assert exact["texts_alike"] == exact["texts"] >= 30
    assert exact["file_bytes"] > 1.7 * eight["file_bytes"] > 1.7 * 1.4 * four["file_bytes"]
    assert abs(exact["perplexity"] / exact["reference_perplexity"] - 1) < 2e-3
    name = "adapter-of-it"
    levels = {f"{name}-{level}.gguf" for level in ("F16", "Q8_0", "Q4_K_M")}
    assert files(tmp_path) == levels | {"reference.npz", "manifest.json", "README.md", "Modelfile"}
    if kind != "qwen3":
        experts = outcome.manifest["experts"]
        assert (experts["experts"], experts["silent"]) == (8, 0)
        assert all(
            min(layer["update_norms"]) > 0 == layer["update_checked"] - 1 for layer in experts["layers"].values()
        )
    base = load_reference(tmp_path / "out" / "work" / "base.reference.npz")
    tuned = load_reference(tmp_path / "out" / "reference.npz")
    assert np.nanmax(np.abs(base.next_logprobs_N - tuned.next_logprobs_N)) > 0.05, "the adapter does something"
    verdict = judge(tmp_path / "out" / f"{name}-Q8_0.gguf", tmp_path / "out", threads=1)
    assert verdict["passed"] and verdict["figures"]["kl_mean"] == pytest.approx(eight["kl_mean"])


def test_a_whole_model_without_adapter_and_mixed_recipes(tmp_path: Path) -> None:
    make(tmp_path, "qwen2_moe", **export_models.ADAPTED)
    outcome = run(tmp_path, "f32,bf16,iq4_xs,q4_k_m:ffn_down_exps=q8_0", source="base")
    f32, bf16, four, mixed = (entry["figures"] for entry in outcome.manifest["files"])
    assert f32["kl_median"] < 1e-6 and f32["top1"] > 0.99
    assert outcome.passed and f32["kl_median"] * 5 < bf16["kl_median"] < four["kl_median"] / 10
    assert mixed["file_bytes"] > four["file_bytes"]


def test_a_second_time_nothing_is_done_again(mine: Path) -> None:
    shutil.rmtree(mine / "out")
    run(mine, "q8_0")
    work = mine / "out" / "work"
    kept = {file: file.stat().st_mtime_ns for file in work.rglob("*") if file.is_file()}
    said = io.StringIO()
    outcome = run(mine, "q8_0,q6_k", said=said)
    assert outcome.passed and len(outcome.manifest["files"]) == 2
    assert "merge: done before" in said.getvalue() and "quantise tuned to Q8_0: done before" in said.getvalue()
    assert "compare tuned Q8_0: done before" in said.getvalue() and "compare tuned Q6_K: done" not in said.getvalue()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    adapter = mine / "adapter-of-it" / "adapter_model.safetensors"
    save_file({key: value * 1.5 for key, value in load_file(adapter).items()}, adapter, {"format": "pt"})
    said = io.StringIO()
    run(mine, to="merged", said=said)
    assert "merge: done before" not in said.getvalue(), "another adapter is another model"


def test_an_adapter_on_quantised_bases(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe", rank_pattern={"q_proj": 2}, use_rslora=True, **export_models.EXPERTS_TOO)
    merged = run(tmp_path, "f16,q8_0")
    beside = run(tmp_path, "f16,q8_0", to="adapter-gguf")
    assert beside.passed, beside.manifest["files"]
    for one, other in zip(merged.manifest["files"], beside.manifest["files"], strict=True):
        assert other["figures"]["kl_median"] == pytest.approx(one["figures"]["kl_median"], rel=1.0)
        assert other["file"] == "adapter-of-it-adapter.gguf"
    assert beside.manifest["files"][0]["figures"]["same_answers"] == 3
    assert (
        (tmp_path / "out" / "Modelfile")
        .read_text()
        .startswith("FROM ./base-Q8_0.gguf\nADAPTER ./adapter-of-it-adapter.gguf\n")
    )
    alone = judge(tmp_path / "out" / "base-Q8_0.gguf", tmp_path / "out", threads=1)
    assert not alone["passed"], "the base without its adapter is another model"
    together = judge(
        tmp_path / "out" / "base-Q8_0.gguf", tmp_path / "out", threads=1,
        adapter=tmp_path / "out" / "adapter-of-it-adapter.gguf",
    )  # fmt: skip
    assert together["passed"]


def test_permuted_heads_of_an_adapter(tmp_path: Path) -> None:
    make(tmp_path, "mixtral")
    outcome = run(tmp_path, "f16", to="adapter-gguf")
    assert outcome.passed and outcome.manifest["files"][0]["figures"]["kl_median"] < 5e-6


def test_the_merged_folder(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe")
    said = io.StringIO()
    outcome = run(tmp_path, to="merged", dtype=torch.bfloat16, said=said)
    assert outcome.passed and (tmp_path / "out" / "merged" / "config.json").is_file()
    assert outcome.manifest["merge"]["lost"] > 0 and not list((tmp_path / "out").glob("*.gguf"))
    small = tmp_path / "adapter-of-it" / "adapter_model.safetensors"
    shrunk = {k: v * (0.01 if "lora_B" in k else 1.0) for k, v in load_file(small).items()}
    save_file(shrunk, small, {"format": "pt"})
    run(tmp_path, to="merged", dtype=torch.bfloat16, said=said)
    assert "the merged weights lose" in said.getvalue()


def test_a_file_that_is_not_the_model_fails(exported: Path, tmp_path: Path) -> None:
    """Swapping two experts in the file is what a wrong adapter layout does: it loads, and answers otherwise."""
    good = exported / "out" / "adapter-of-it-F16.gguf"
    [stack] = [t for t in gguf.GGUFReader(good).tensors if t.name == "blk.0.ffn_up_exps.weight"]
    content = bytearray(good.read_bytes())
    start, length = int(stack.data_offset), stack.n_bytes // 4
    first, second = content[start : start + length], content[start + length : start + 2 * length]
    content[start : start + 2 * length] = second + first
    bad = tmp_path / "adapter-of-it-F16.gguf"
    bad.write_bytes(content)
    verdict = judge(bad, exported / "out", threads=1)
    assert not verdict["passed"]
    median, other_bytes = [gate for gate in verdict["gates"] if not gate["passed"]]
    assert median["name"] == "median KL" and median["value"] > 100 * median["limit"]
    assert "sha256" in other_bytes["name"]


def test_every_weight_has_an_importance_and_experts_their_own(exported: Path) -> None:
    matrix = load_importance(exported / "out" / "work" / "tuned.importance.npz")
    assert matrix["blk.1.ffn_down_exps.weight"].shape == matrix["blk.1.ffn_up_exps.weight"].shape == (4, 256)
    assert (matrix["blk.0.ffn_up_exps.weight"] == matrix["blk.0.ffn_gate_exps.weight"]).all()
    assert "output.weight" not in matrix and "blk.0.attn_output.weight" in matrix
    assert all((values > 0).all() for values in matrix.values())


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_at_each_step(tmp_path: Path) -> None:
    """Each time the step that met it is named and what was done stays; with space again it goes on from there."""
    make(tmp_path, "qwen3_moe")
    sizes = {"merge": 4_000_000, "answers": 1_000_000, "convert": 4_000_000, "quantise": 1_500_000}
    with full_disk(sizes["merge"]), pytest.raises(RunFailed, match="merge: the disk is full"):
        run(tmp_path, "q8_0")
    assert not (tmp_path / "out" / "work" / "merged").exists()
    run(tmp_path, to="gguf", quant="f16")
    work = tmp_path / "out" / "work"
    for file in [*work.glob("*.gguf"), *work.glob("convert-*"), *work.glob("compare-*"), work / "study-tuned.json"]:
        file.unlink()
    with full_disk(sizes["answers"]), pytest.raises(RunFailed, match="answers: the disk is full"):
        run(tmp_path, "f16")
    with full_disk(sizes["convert"]), pytest.raises(RunFailed, match="convert base to f16: the disk is full"):
        run(tmp_path, "f16")
    assert run(tmp_path, "f16").passed
    with full_disk(sizes["quantise"]), pytest.raises(RunFailed, match=r"could not quantise to Q8_0.*Is the disk full"):
        run(tmp_path, "q8_0")
    assert not list(work.glob("*Q8_0*")) and (tmp_path / "out" / "adapter-of-it-F16.gguf").is_file()
    assert run(tmp_path, "q8_0").passed


def refused(action: Callable[[], object], words: str, kind: type[GatewrightError] = ModelError) -> None:
    with pytest.raises(kind, match=words):
        action()


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe")
    config = tmp_path / "base" / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps(json.loads(kept) | {"norm_topk_prob": False}))
    refused(lambda: run(tmp_path), "norm_topk_prob")
    config.write_text(kept)
    weights = tmp_path / "base" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5000])
    refused(lambda: run(tmp_path), "cut off or damaged")
    weights.write_bytes(whole)
    refused(lambda: run(tmp_path, source="base", to="adapter-gguf"), "is for adapters", UserError)
    refused(lambda: run(tmp_path, source="nothing"), "is no run", UserError)
    adapter = tmp_path / "adapter-of-it" / "adapter_model.safetensors"
    tensors = load_file(adapter)
    save_file({key.replace("layers.1", "layers.7"): value for key, value in tensors.items()}, adapter, {"format": "pt"})
    refused(lambda: run(tmp_path), "adapts model.layers.7")
    save_file(tensors, adapter, {"format": "pt"})
    assert not list((tmp_path / "out").glob("*.*"))


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    make(tmp_path, "qwen3", **export_models.ADAPTED)
    (tmp_path / "base" / "chat_template.jinja").unlink()
    for file in (tmp_path / "adapter-of-it").glob("*.jinja"):
        file.unlink()
    refused(lambda: run(tmp_path, "f16"), "this tokenizer has none; set data.chat_template", DataError)


def test_weights_trained_whole_are_no_gguf_adapter(tmp_path: Path) -> None:
    make(tmp_path, "qwen3", **export_models.ADAPTED, modules_to_save=["lm_head"])
    refused(lambda: run(tmp_path, "f16", to="adapter-gguf"), "was trained whole")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q4_m", "did you mean q4_k_m"),
        ("", "is empty"),
        ("q8_0:ffn", "wanted :PATTERN=TYPE"),
        ("q8_0:(=q6_k", "no regular expression"),
        ("f16:ffn=q8_0", "not in f16"),
    ],
)
def test_unknown_levels(text: str, words: str) -> None:
    refused(lambda: parse_recipes(text), words, UserError)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    refused(lambda: open_engine(file, context_tokens=16), "llama.cpp cannot load it")
    refused(lambda: load_reference(file), "damaged")
    refused(lambda: judge(file, tmp_path, threads=1), "give the folder that `gatewright export` wrote")
