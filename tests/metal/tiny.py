"""Tiny random models of real architectures, made on the spot."""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from gatewright.spec.run import Run

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config(kind: str, **changes: object) -> PretrainedConfig:
    """A tiny model: llama, llama-tied, mixtral, qwen2_moe (shared experts), llama4, qwen3_moe (dense first layer)."""
    if kind == "llama":
        return LlamaConfig(**SIZES | {"tie_word_embeddings": False} | changes)
    if kind == "llama-tied":
        return LlamaConfig(**SIZES | {"tie_word_embeddings": True} | changes)
    if kind == "mixtral":
        return MixtralConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes)
    if kind == "qwen2_moe":
        moe = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        return Qwen2MoeConfig(**SIZES | moe | {"num_experts_per_tok": 2, "norm_topk_prob": True} | changes)
    if kind == "llama4":
        moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 48, "head_dim": 8}
        layers = {"moe_layers": [1, 2], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 32}
        return Llama4TextConfig(**SIZES | moe | layers | {"tie_word_embeddings": False} | changes)
    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 16,
    }
    return Qwen3MoeConfig(**SIZES | moe | {"mlp_only_layers": [0]} | changes)


def save_model(kind: str, folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Writes a random model of that kind in float32; routers and norms are random enough to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(kind, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.8, 1.2)
            else:
                parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    return folder


def load_plain(folder: Path, **kwargs: object) -> PreTrainedModel:
    """The model as transformers alone loads it, in eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **kwargs)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a saved adapter."""
    return load_file(folder / "adapter_model.safetensors")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges (260 ids) with a ChatML template, written into a model folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=specials[1:2]
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def save_rows(path: Path, rows: int, *, seed: int = 0) -> Path:
    """Chat rows about small sums, of uneven length."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            a, b, words = draw.randrange(50), draw.randrange(50), draw.randrange(1, 6)
            question = f"Please add {'up ' * words}{a} and {b}."
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": str(a + b)}]
            if draw.random() < 0.3:
                messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_run(folder: Path, kind: str, **changes: object) -> Run:
    """A run of a tiny model with its tokenizer and data under `folder`; `changes` are dotted keys with __ for a dot."""
    base = folder / f"base-{kind}"
    if not base.exists():
        save_model(kind, base, vocab_size=272)
        save_tokenizer(base)
        save_rows(folder / "train.jsonl", 60)
        save_rows(folder / "heldout.jsonl", 12, seed=1)
    targets = ["attention", "mlp"] if kind.startswith("llama") else ["attention", "experts"]
    values: dict[str, object] = {
        "run": "tiny",
        "model__path": str(base),
        "model__dtype": "float32",
        "method__adapter__rank": 4,
        "method__adapter__targets": targets,
        "data__train": str(folder / "train.jsonl"),
        "train__tokens_per_step": 400,
        "train__micro_batch_tokens": 200,
        "train__steps": 4,
        "train__lr": 5e-3,
        "train__threads": 1,
        "runs_dir": str(folder / "runs"),
    }
    nested: dict[str, object] = {}
    for key, value in (values | changes).items():
        *path, last = key.split("__")
        inside = nested
        for part in path:
            inside = inside.setdefault(part, {})  # type: ignore[assignment]
        inside[last] = value
    return Run.model_validate(nested)


def events(run: Run, kind: str) -> list[dict[str, object]]:
    """The events of one kind in a run's log."""
    lines = (run.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]
