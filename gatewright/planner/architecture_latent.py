"""Decoders with multi-head latent attention (MLA): DeepSeek V2 to V3.2, Kimi K2, GLM-5, GLM-4.7-Flash."""

from gatewright.planner.architecture_config import Config
from gatewright.planner.architecture_grouped import Experts, Traits, after_dense_layers, dense_mlp, shared_by_count
from gatewright.planner.architecture_grouped import sparse_mlp as sparse
from gatewright.planner.tensors import Block, group, linear, norms
from gatewright.spec.shape import Attention, Layer, Linear, TensorGroup

LATENT_EXPERTS = Experts(layers=after_dense_layers, shared_width=shared_by_count)


def blocks(config: Config, traits: Traits, *, indexed: bool = False) -> list[Block]:
    """The decoder's layers; `indexed` adds the indexer of sparse attention (V3.2, GLM-5)."""
    indexers = indexer_layers(config) if indexed else [False] * config.layers
    return [
        block(config, traits, moe=moe, indexed=indexed, indexer=indexer)
        for moe, indexer in zip(after_dense_layers(config), indexers, strict=True)
    ]


def block(config: Config, traits: Traits, *, moe: bool, indexed: bool = False, indexer: bool = False) -> Block:
    attention, mixing = latent_attention(config, indexed=indexed, indexer=indexer)
    bias = config.flag(traits.mlp_bias) if isinstance(traits.mlp_bias, str) else traits.mlp_bias
    mlp, parts = sparse(config, LATENT_EXPERTS, bias=bias) if moe else dense_mlp(config, traits)
    return Block(layer=Layer(attention=attention, mlp=mlp), groups=(mixing, *parts, norms(config.hidden, count=2)))


def indexer_layers(config: Config) -> list[bool]:
    """Layers with an indexer of their own; GLM-5 lets the others reuse an earlier layer's choice."""
    types = config.per_layer("indexer_types", allowed=("full", "shared"))
    if types:
        return [kind == "full" for kind in types]
    pattern = config.text("index_topk_pattern")
    if pattern and len(pattern) >= config.layers:
        return [letter == "F" for letter in pattern[: config.layers]]
    frequency = config.optional_size("index_topk_freq") or 1
    offset = config.count("index_skip_topk_offset") if config.get("index_skip_topk_offset") is not None else 2
    return [max(layer - offset + 1, 0) % frequency == 0 for layer in range(config.layers)]


def latent_attention(config: Config, *, indexed: bool = False, indexer: bool = False) -> tuple[Attention, TensorGroup]:
    """MLA: queries through a low rank or in full, keys and values through a cached latent."""
    hidden, heads = config.hidden, config.heads
    nope, rope, value = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim"), config.size("v_head_dim")
    q_rank, kv_rank = config.optional_size("q_lora_rank"), config.size("kv_lora_rank")
    bias = config.flag("attention_bias")
    attention = Attention(
        kind="sparse_latent" if indexed else "latent",
        heads=heads,
        kv_heads=heads,
        qk_dim=nope + rope,
        v_dim=value,
        q_rank=q_rank,
        kv_rank=kv_rank,
        rope_dim=rope,
        index_heads=config.size("index_n_heads") if indexer else 0,
        index_dim=config.size("index_head_dim") if indexer else 0,
        index_top_k=config.size("index_topk") if indexed else None,
    )
    query = (
        (linear("q_proj", hidden, heads * (nope + rope)),)
        if q_rank is None
        else (linear("q_a_proj", hidden, q_rank, bias=bias), linear("q_b_proj", q_rank, heads * (nope + rope)))
    )
    picks: tuple[Linear, ...] = ()
    if indexer:
        picks = (
            linear("wq_b", q_rank or hidden, attention.index_heads * attention.index_dim),
            linear("wk", hidden, attention.index_dim),
            linear("weights_proj", hidden, attention.index_heads),
        )
    return attention, group(
        "attention",
        *query,
        linear("kv_a_proj_with_mqa", hidden, kv_rank + rope, bias=bias),
        linear("kv_b_proj", kv_rank, heads * (nope + value)),
        linear("o_proj", heads * value, hidden, bias=bias),
        *picks,
        extra=(q_rank or 0) + kv_rank + 2 * attention.index_dim,
    )
