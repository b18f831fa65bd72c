"""Decoders that mix attention with linear recurrences: Qwen3-Next/3.5, MiniMax, Kimi Linear, Granite 4, Nemotron-H."""

from typing import Any

from gatewright.planner.architecture_config import Config
from gatewright.planner.architecture_grouped import (
    FULL,
    Experts,
    Traits,
    after_dense_layers,
    dense_mlp,
    shared_by_count,
    sparse_mlp,
)
from gatewright.planner.architecture_grouped import block as grouped_block
from gatewright.planner.architecture_latent import latent_attention
from gatewright.planner.tensors import Block, group, grouped_attention, linear, norms
from gatewright.spec.shape import Attention, Layer, TensorGroup

FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"
MIXERS = (FULL_ATTENTION, LINEAR_ATTENTION)


def mixers(config: Config, *, default: list[str]) -> list[str]:
    """full_attention or linear_attention, a layer each: from layer_types, else the family's rule."""
    legacy = {"attention": FULL_ATTENTION, "mamba": LINEAR_ATTENTION}
    kinds = config.per_layer("layer_types", allowed=(*MIXERS, *legacy))
    return [legacy.get(kind, kind) for kind in kinds or default]


# Qwen3-Next, Qwen3.5, Qwen3.6: gated delta net, and attention with an output gate


def delta_blocks(config: Config, traits: Traits, *, fused: bool) -> list[Block]:
    """`fused`: Qwen3-Next's two input projections; Qwen3.5 has four."""
    interval = config.optional_size("full_attention_interval") or 4
    default = [MIXERS[bool((layer + 1) % interval)] for layer in range(config.layers)]
    sparse = traits.experts.layers(config) if traits.experts else [False] * config.layers
    return [
        delta_block(config, traits, kind=kind, moe=moe, fused=fused)
        for kind, moe in zip(mixers(config, default=default), sparse, strict=True)
    ]


def delta_block(config: Config, traits: Traits, *, kind: str, moe: bool, fused: bool) -> Block:
    attention, mixing = delta_net(config, fused=fused) if kind == LINEAR_ATTENTION else gated_attention(config)
    mlp, parts = sparse_mlp(config, traits.experts) if moe and traits.experts else dense_mlp(config, traits)
    return Block(layer=Layer(attention=attention, mlp=mlp), groups=(mixing, *parts, norms(config.hidden, count=2)))


def delta_mtp(config: Config, traits: Traits, *, count: int) -> list[Block]:
    """Full-attention blocks behind one projection of [embedding, state] and three norms; embeddings are shared."""
    if not count:
        return []
    hidden = config.hidden
    inner = delta_block(config, traits, kind=FULL_ATTENTION, moe=traits.experts is not None, fused=False)
    joint = group("mtp", linear("fc", 2 * hidden, hidden))
    return [
        Block(layer=inner.layer, groups=(*inner.groups, joint, norms(hidden, count=3))),
        *[inner] * (count - 1),
    ]


def gated_attention(config: Config) -> tuple[Attention, TensorGroup]:
    width, bias = config.head_dim, config.flag("attention_bias")
    attention = Attention(
        kind="full", heads=config.heads, kv_heads=config.kv_heads, qk_dim=width, v_dim=width, gated=True
    )
    return attention, grouped_attention(attention, hidden=config.hidden, qkv_bias=bias, out_bias=bias, extra=2 * width)


def delta_net(config: Config, *, fused: bool) -> tuple[Attention, TensorGroup]:
    hidden, taps = config.hidden, config.size("linear_conv_kernel_dim")
    attention = Attention(
        kind="linear",
        heads=config.size("linear_num_value_heads"),
        kv_heads=config.size("linear_num_key_heads"),
        qk_dim=config.size("linear_key_head_dim"),
        v_dim=config.size("linear_value_head_dim"),
        gated=True,
        conv_kernel=taps,
    )
    heads, keys = attention.heads, attention.kv_heads * attention.qk_dim
    values = heads * attention.v_dim
    inputs = (
        (linear("in_proj_qkvz", hidden, 2 * keys + 2 * values), linear("in_proj_ba", hidden, 2 * heads))
        if fused
        else (
            linear("in_proj_qkv", hidden, 2 * keys + values),
            linear("in_proj_z", hidden, values),
            linear("in_proj_b", hidden, heads),
            linear("in_proj_a", hidden, heads),
        )
    )
    extra = (2 * keys + values) * taps + 2 * heads + attention.v_dim
    return attention, group("linear_attention", *inputs, linear("out_proj", values, hidden), extra=extra)


# MiniMax-01: lightning attention


def lightning_blocks(config: Config, traits: Traits) -> list[Block]:
    old = config.integers("attn_type_list")
    default = [MIXERS[layer % 2] for layer in range(config.layers)]
    if old is not None and len(old) >= config.layers:
        default = [FULL_ATTENTION if kind else LINEAR_ATTENTION for kind in old[: config.layers]]
    return [
        lightning_block(config, traits)
        if kind == LINEAR_ATTENTION
        else grouped_block(config, traits, window=FULL, moe=True)
        for kind in mixers(config, default=default)
    ]


def lightning_block(config: Config, traits: Traits) -> Block:
    hidden, heads, width = config.hidden, config.heads, config.head_dim
    inner = heads * width
    attention = Attention(kind="linear", heads=heads, kv_heads=heads, qk_dim=width, v_dim=width, gated=True)
    mixing = group(
        "linear_attention",
        linear("qkv_proj", hidden, 3 * inner),
        linear("output_gate", hidden, inner),
        linear("out_proj", inner, hidden),
        extra=inner,
    )
    mlp, parts = sparse_mlp(config, traits.experts or Experts())
    return Block(layer=Layer(attention=attention, mlp=mlp), groups=(mixing, *parts, norms(hidden, count=2)))


# Kimi Linear: Kimi delta attention (KDA) and MLA


def kimi_blocks(config: Config, traits: Traits) -> list[Block]:
    nested = linear_settings(config)
    default = [MIXERS[not (layer and layer % 4 == 0)] for layer in range(config.layers)]
    full_layers = nested.integers("full_attn_layers")
    if full_layers is not None:
        default = [MIXERS[layer + 1 not in full_layers] for layer in range(config.layers)]
    experts = Experts(layers=after_dense_layers, shared_width=shared_by_count)
    sparse = after_dense_layers(config)
    blocks = []
    for kind, moe in zip(mixers(config, default=default), sparse, strict=True):
        attention, mixing = kimi_delta(config, nested) if kind == LINEAR_ATTENTION else latent_attention(config)
        mlp, parts = sparse_mlp(config, experts) if moe else dense_mlp(config, traits)
        layer = Layer(attention=attention, mlp=mlp)
        blocks.append(Block(layer=layer, groups=(mixing, *parts, norms(config.hidden, count=2))))
    return blocks


def linear_settings(config: Config) -> Config:
    """The config with the entries of linear_attn_config in front; it counts layers from 1."""
    nested = config.get("linear_attn_config")
    own: dict[str, Any] = nested if isinstance(nested, dict) else {}
    renamed = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    values: dict[str, Any] = {renamed.get(key, key): value for key, value in own.items()}
    return Config({**config.values, **values}, family=config.family, where=config.where)


def kimi_delta(config: Config, nested: Config) -> tuple[Attention, TensorGroup]:
    heads, width = nested.size("linear_num_heads"), nested.size("linear_head_dim")
    taps = nested.size("linear_conv_kernel_dim")
    hidden, inner = config.hidden, heads * width
    attention = Attention(
        kind="linear", heads=heads, kv_heads=heads, qk_dim=width, v_dim=width, gated=True, conv_kernel=taps
    )
    return attention, group(
        "linear_attention",
        *(linear(name, hidden, inner) for name in ("q_proj", "k_proj", "v_proj")),
        linear("f_a_proj", hidden, width),
        linear("f_b_proj", width, inner),
        linear("b_proj", hidden, heads),
        linear("g_a_proj", hidden, width),
        linear("g_b_proj", width, inner),
        linear("o_proj", inner, hidden),
        extra=3 * inner * taps + inner + heads + width,
    )
