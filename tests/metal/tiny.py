"""Tiny random models of real architectures, made on the spot."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

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
    """A tiny model: llama, llama-tied, mixtral, qwen2_moe (shared experts), qwen3_moe (with a dense first layer)."""
    if kind == "llama":
        return LlamaConfig(**SIZES | {"tie_word_embeddings": False} | changes)
    if kind == "llama-tied":
        return LlamaConfig(**SIZES | {"tie_word_embeddings": True} | changes)
    if kind == "mixtral":
        return MixtralConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes)
    if kind == "qwen2_moe":
        moe = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        return Qwen2MoeConfig(**SIZES | moe | {"num_experts_per_tok": 2, "norm_topk_prob": True} | changes)
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
