"""Merging adapters into their base, against PEFT's own merge and against the unmerged model; and what is refused."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from gatewright.export.deltas import read_adapter
from gatewright.export.merge import Merged, empty_model, merge
from gatewright.spec.errors import ModelError

TOKENS = torch.arange(1, 40)[None]
LINEAR = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
EXPERTS = LINEAR | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapt(base: Path, folder: Path, **settings: object) -> PreTrainedModel:
    """Saves a PEFT adapter with random factors, and returns the adapted model."""
    torch.manual_seed(1)
    model = get_peft_model(tiny.load_plain(base), LoraConfig(r=4, lora_alpha=8, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn_like(parameter) * 0.1
                parameter.add_(noise) if "magnitude" in name or "modules_to_save" in name else parameter.copy_(noise)
    model.save_pretrained(folder)
    return model


def merged(base: Path, adapter: Path, out: Path, *, dtype: torch.dtype = torch.float32, **settings: object) -> Merged:
    model = empty_model(base)
    files = read_adapter(adapter, model, base=base)
    return merge(base, files, model, out, dtype=dtype, tick=lambda done, total: None, **settings)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", LINEAR),
        ("llama", LINEAR | {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
        ("llama", LINEAR | {"use_dora": True}),
        ("llama", LINEAR | {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("llama-tied", LINEAR | {"modules_to_save": ["embed_tokens"]}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", EXPERTS | {"modules_to_save": ["gate"]}),
        ("qwen2_moe", EXPERTS),
        ("mixtral", EXPERTS),
    ],
    ids=["plain", "patterns", "dora", "head", "untied", "embedding", "experts", "router", "shared", "mixtral"],
)
def test_the_merged_model_is_the_adapted_one(tmp_path: Path, kind: str, settings: dict[str, object]) -> None:
    base = tiny.save_model(kind, tmp_path / "base")
    wanted = logits(adapt(base, tmp_path / "adapter", **settings))
    found = merged(base, tmp_path / "adapter", tmp_path / "out")
    got = logits(tiny.load_plain(tmp_path / "out"))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    assert (got - logits(tiny.load_plain(base))).abs().max() > 1e-2
    assert 0 < found.updated < found.tensors
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) <= set(after), "the base's names"


def test_transposed_experts_with_biases(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
        layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    wanted = logits(adapt(tmp_path / "base", tmp_path / "adapter", **EXPERTS))
    merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits(tiny.load_plain(tmp_path / "out")), wanted, atol=2e-5, rtol=1e-4)


def test_rounding_to_bf16_is_measured(tmp_path: Path) -> None:
    base = tiny.save_model("llama", tmp_path / "base")
    adapt(base, tmp_path / "adapter", **LINEAR)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    small = {k: v * (0.01 if "lora_B" in k else 1.0) for k, v in load_file(file).items()}
    save_file(small, file, {"format": "pt"})
    exact = merged(base, tmp_path / "adapter", tmp_path / "f32").rounding
    half = merged(base, tmp_path / "adapter", tmp_path / "f16", dtype=torch.float16).rounding
    brain = merged(base, tmp_path / "adapter", tmp_path / "bf16", dtype=torch.bfloat16).rounding
    assert exact.lost < 1e-3 < half.lost < brain.lost and brain.unchanged > 0.3
    assert load_file(tmp_path / "bf16" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_many_small_shards_and_going_on_after_an_interruption(tmp_path: Path) -> None:
    base = tiny.save_model("qwen3_moe", tmp_path / "base")
    wanted = logits(adapt(base, tmp_path / "adapter", **EXPERTS))
    merged(base, tmp_path / "adapter", tmp_path / "out", shard_bytes=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    before = {file.name: file.stat().st_mtime_ns for file in files}
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-7])
    merged(base, tmp_path / "adapter", tmp_path / "out", shard_bytes=30_000)
    after = {file.name: file.stat().st_mtime_ns for file in files}
    assert [n for n in before if before[n] != after[n]] == [files[1].name, files[2].name]
    torch.testing.assert_close(logits(tiny.load_plain(tmp_path / "out")), wanted, atol=2e-5, rtol=1e-4)


def refusal(tmp_path: Path, kind: str = "llama", **settings: object) -> str:
    base = tmp_path / "base" if (tmp_path / "base").exists() else tiny.save_model(kind, tmp_path / "base")
    if not (tmp_path / "adapter").exists():
        adapt(base, tmp_path / "adapter", **settings)
    with pytest.raises(ModelError) as error:
        merged(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


def edit(tmp_path: Path, **changes: object) -> None:
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(tmp_path: Path, change: object) -> None:
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, file, {"format": "pt"})


def test_lora_on_one_of_two_tied_weights_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, "llama-tied", target_modules=["embed_tokens", "q_proj"])
    assert "ties to lm_head.weight" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "only LORA is merged"),
        ({"bias": "all"}, "bias = 'all' is not merged"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_settings_that_change_the_meaning_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    adapt(tiny.save_model("llama", tmp_path / "base"), tmp_path / "adapter", **LINEAR)
    edit(tmp_path, **change)
    assert words in refusal(tmp_path)


def test_fused_experts_of_an_old_peft_are_refused(tmp_path: Path) -> None:
    adapt(tiny.save_model("qwen3_moe", tmp_path / "base"), tmp_path / "adapter", **EXPERTS)
    edit(tmp_path, peft_version="0.18.0")
    assert "scramble the experts" in refusal(tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    adapt(tiny.save_model("llama", tmp_path / "base"), tmp_path / "adapter", **LINEAR)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.__setitem__(key, tensors[key] * float("nan")))
    assert "q_proj.lora_B.weight holds NaN" in refusal(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(key))
    assert "no lora_B" in refusal(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "missing or damaged" in refusal(tmp_path)


def test_another_base_is_refused(tmp_path: Path) -> None:
    adapt(tiny.save_model("llama", tmp_path / "first"), tmp_path / "adapter", **LINEAR)
    tiny.save_model("llama", tmp_path / "base", hidden_size=16)
    assert "made for another model" in refusal(tmp_path)


def test_our_own_adapter_names_its_base(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=1)
    from rich.console import Console

    from gatewright.train.loop import train

    assert train(run, console=Console(quiet=True)) == 0
    base, adapter = Path(run.model.path), run.folder / "adapter"
    merged(base, adapter, tmp_path / "out")
    stock = PeftModel.from_pretrained(tiny.load_plain(base), adapter)
    torch.testing.assert_close(logits(tiny.load_plain(tmp_path / "out")), logits(stock), atol=2e-5, rtol=1e-4)
    other = tiny.save_model("qwen3_moe", tmp_path / "other", seed=5, vocab_size=272)
    with pytest.raises(ModelError, match="another base model"):
        merged(other, adapter, tmp_path / "out2")
