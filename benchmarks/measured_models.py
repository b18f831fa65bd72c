"""Shapes of the models that the measured rows name: a table of public configs, and a guess from the size for others."""

import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatewright.planner.architecture import read_shape
from gatewright.planner.catalogue import Entry, models
from gatewright.planner.tensors import Block, assemble, grouped_attention, norms, plain_mlp
from gatewright.spec.shape import Attention, Layer, Mlp, ModelShape

DATA = Path(__file__).parent / "data" / "models.json"


@dataclass(frozen=True)
class Found:
    shape: ModelShape
    how: str
    """table, catalogue, or guess: shape scaled from a known model to the parameter count the row states."""


def find_shape(name: str, *, total_b: float | None, active_b: float | None, moe: bool) -> Found | None:
    """The model's shape; None when the name is unknown and no size is stated."""
    key = normalised(name)
    for row_key, row in table().items():
        if re.search(row["match"], key):
            shape = build(row_key)
            off = total_b and abs(shape.parameters / 1e9 / total_b - 1)
            if not off or off < 0.35 or "config" not in row:
                return Found(shape, "table")
    listed = catalogue_shapes().get(key.replace(" ", "-"))
    if listed is not None:
        return Found(listed.shape(), "catalogue")
    size = total_b or size_in_name(key)
    if size is None:
        return None
    return Found(guess(size, active_b=active_b or size_in_name(key, active=True), moe=moe), "guess")


def normalised(name: str) -> str:
    key = name.strip().lower().replace(" ", "-").replace("_b", "b")
    key = key.replace("deepseek-v3-proxy", "deepseek-v3 proxy").replace("deepseek-like-proxy-", "deepseek-like proxy ")
    return re.sub(r"-(instruct|base|chat|it|hf|gptq|awq|fp8|nvfp4|pretrained|thinking)\b", "", key)


@functools.cache
def table() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


@functools.cache
def catalogue_shapes() -> dict[str, Entry]:
    """The product's catalogue by normalised name, hub name and alias."""
    named = ((name, item) for item in models() for name in (item.name, item.hub.split("/")[1], *item.also))
    return {normalised(name): item for name, item in named}


@functools.cache
def build(key: str) -> ModelShape:
    row = table()[key]
    return read_shape(row["config"], name=key) if "config" in row else plain_shape(key, **row["plain"])


def plain_shape(
    name: str, *, hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> ModelShape:
    """GPT-style decoder with biases and a two-matrix MLP (GPT-NeoX, Phi-2, Falcon, BigCode, Megatron's GPT)."""
    dim = hidden // heads
    attention = Attention(kind="full", heads=heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim)
    mlp = Mlp(kind="dense", width=width, matrices=2)
    block = Block(
        layer=Layer(attention=attention, mlp=mlp),
        groups=(
            grouped_attention(attention, hidden=hidden, qkv_bias=True, out_bias=True),
            plain_mlp("dense_mlp", hidden=hidden, width=width, bias=True),
            norms(hidden, count=2, bias=True),
        ),
    )
    shape = ModelShape(name=name, family="gpt", hidden=hidden, vocab=vocab, tied=tied, layers=(), groups=())
    return assemble(shape, blocks=[block] * layers)


def size_in_name(key: str, *, active: bool = False) -> float | None:
    """Billions of parameters that the name itself states: 30b-a3b."""
    found = re.search(r"-a(\d+(?:\.\d+)?)(b|m)" if active else r"(\d+(?:\.\d+)?)(b)\b", key)
    if found is None:
        return None
    return float(found[1]) / (1000 if found[2] == "m" else 1)


def guess(total_b: float, *, active_b: float | None, moe: bool) -> ModelShape:
    """A shape of the stated size: a Llama-like dense model, or experts in the proportions of Qwen3-30B-A3B."""
    if not moe:
        layers = round(14 * max(total_b, 0.1) ** 0.4)
        vocab = 131072
        hidden = 512
        while 12.5 * layers * hidden**2 + 2 * vocab * hidden < total_b * 1e9:
            hidden += 128
        values: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": hidden * 7 // 2,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, hidden // 128),
            "num_key_value_heads": math.gcd(max(1, hidden // 128), 8),
            "vocab_size": vocab,
            "tie_word_embeddings": total_b < 4,
            "head_dim": 128,
        }
        return read_shape(values, name=f"dense-{total_b:g}b")
    layers, hidden = round(30 * (total_b / 30) ** 0.25) + 14, 2048
    while hidden < 8192 and hidden**2 * layers * 12 < (active_b or total_b / 10) * 1e9 * 0.75:
        hidden += 256
    dense = layers * 2.3 * hidden**2 + 2 * 151936 * hidden
    experts = 128
    width = max(128, round((total_b * 1e9 - dense) / (layers * experts * 3 * hidden) / 64) * 64)
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return read_shape(values, name=f"moe-{total_b:g}b")
