"""GGUF files hold what the model's files hold; what llama.cpp cannot represent is refused, and nothing is written."""

import json
from pathlib import Path

import export_models
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gatewright.data.tokenizer import load_tokenizer
from gatewright.export.convert import convert
from gatewright.export.llama import open_engine
from gatewright.export.reference import HARD_TEXTS
from gatewright.export.vocabulary import read_vocabulary
from gatewright.spec.errors import ModelError


def written(base: Path, precision: str = "f32") -> gguf.GGUFReader:
    out = base.parent / f"{base.name}-{precision}.gguf"
    convert(base, out, precision=precision, name="tiny", tick=lambda done, total: None)
    assert [file.name for file in base.parent.glob("*.partial")] == []
    return gguf.GGUFReader(out)


def refusal(base: Path) -> str:
    with pytest.raises(ModelError) as error:
        written(base)
    assert not list(base.parent.glob("*.gguf*"))
    return str(error.value)


def edit(base: Path, **changes: object) -> None:
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tensors(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in reader.tensors}


@pytest.mark.parametrize("kind", export_models.CONFIGS)
def test_every_weight_is_there_once_and_as_it_was(tmp_path: Path, kind: str) -> None:
    base = export_models.save_base(kind, tmp_path / "base")
    found = tensors(written(base))
    held = load_file(base / "model.safetensors")
    if kind == "llama3-rope":
        found.pop("rope_freqs.weight")
    assert sum(value.size for value in found.values()) == sum(value.numel() for value in held.values())
    assert np.isclose(
        sum(np.abs(value, dtype=np.float64).sum() for value in found.values()),
        sum(value.double().abs().sum().item() for value in held.values()),
        rtol=1e-9,
    )
    np.testing.assert_array_equal(found["token_embd.weight"], held["model.embed_tokens.weight"].numpy())


def test_experts_are_stacked_in_order(tmp_path: Path) -> None:
    base = export_models.save_base("qwen3_moe", tmp_path / "base")
    held = load_file(base / "model.safetensors")
    found = tensors(written(base, "f16"))
    for expert in range(4):
        weight = held[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        np.testing.assert_array_equal(found["blk.1.ffn_down_exps.weight"][expert], weight.half().numpy())
    assert found["blk.1.ffn_gate_inp.weight"].dtype == np.float32, "routers stay exact"


def test_fused_experts_become_the_same_file(tmp_path: Path) -> None:
    base = export_models.save_base("qwen3_moe", tmp_path / "base")
    fused = export_models.save_base("qwen3_moe", tmp_path / "fused")
    held = load_file(fused / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([held.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        held[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        held[f"{prefix}.down_proj"] = parts["down_proj"]
    save_file(held, fused / "model.safetensors", {"format": "pt"})
    ours, theirs = tensors(written(base)), tensors(written(fused))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.parametrize("kind", ["qwen2", "smollm", "pieces"])
def test_hard_texts_become_the_same_tokens(tmp_path: Path, kind: str) -> None:
    base = export_models.save_base("llama", tmp_path / "base", vocabulary=False)
    export_models.save_tokenizer(base, kind)
    written(base, "f16")
    tokenizer = load_tokenizer(base)
    texts = [text for text in HARD_TEXTS if "\0" not in text] + ["a<|im_start|>b<|im_end|>"]
    with open_engine(tmp_path / "base-f16.gguf", context_tokens=64, threads=1) as engine:
        for text in texts:
            assert engine.tokenize(text) == tokenizer(text, add_special_tokens=False).input_ids, text


def test_the_file_carries_template_and_special_tokens(tmp_path: Path) -> None:
    base = export_models.save_base("qwen3", tmp_path / "base")
    fields = {name: field.contents() for name, field in written(base).fields.items()}
    assert fields["tokenizer.chat_template"] == load_tokenizer(base).chat_template
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert fields["tokenizer.ggml.pre"] == "qwen2"
    assert len(fields["tokenizer.ggml.tokens"]) == export_models.VOCABULARY, "padded to the embedding"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = false, but llama.cpp's qwen3moe graph always"),
        ("olmoe", {"norm_topk_prob": True}, "graph never normalises"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "has experts in every layer"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("llama", {"architectures": ["GraniteForCausalLM"]}, "--converter PATH/convert_hf_to_gguf.py"),
        ("llama", {"vocab_size": 100}, "the model only 100 rows"),
    ],
)
def test_what_gguf_cannot_say_is_refused(tmp_path: Path, kind: str, change: dict[str, object], words: str) -> None:
    base = export_models.save_base(kind, tmp_path / "base")
    edit(base, **change)
    assert words in refusal(base)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    base = export_models.save_base("llama", tmp_path / "base", vocabulary=False)
    export_models.save_tokenizer(base, "unknown")
    assert "no pre-tokenizer that does what this one does (Whitespace, ByteLevel)" in refusal(base)


def test_damaged_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    base = export_models.save_base("mixtral", tmp_path / "base")
    file = base / "model.safetensors"
    held = load_file(file)
    save_file(held | {"model.layers.0.extra.weight": torch.ones(2)}, file, {"format": "pt"})
    assert "extra.weight has no place" in refusal(base)
    lost = next(key for key in held if "experts.2" in key)
    save_file({key: value for key, value in held.items() if key != lost}, file, {"format": "pt"})
    assert "is missing, though config.json says 4 experts" in refusal(base)
    save_file(held, file, {"format": "pt"})
    file.write_bytes(file.read_bytes()[:-1000])
    assert "cut off or damaged" in refusal(base)


def test_no_scores_without_merges(tmp_path: Path) -> None:
    base = export_models.save_base("llama", tmp_path / "base", vocabulary=False)
    export_models.save_tokenizer(base, "pieces")
    vocabulary = read_vocabulary(base, size=export_models.VOCABULARY)
    assert vocabulary.model == "llama" and vocabulary.scores is not None
    made = [score for score in vocabulary.scores if score > -100]
    assert len(made) > 50 and len(set(made)) == len(made), "each merge has a rank of its own"
