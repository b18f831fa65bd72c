"""DeepSeek-V4: compressed attention, grouped low-rank output, hyper-connections in place of one residual stream."""

from gatewright.planner.architecture_config import Config
from gatewright.planner.architecture_grouped import Experts, shared_by_count, sparse_mlp
from gatewright.planner.tensors import Block, group, linear, norms
from gatewright.spec.shape import Attention, Layer, Linear, TensorGroup

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIO_KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""How published configs spell the layer kinds (compress_ratios)."""

EXPERTS = Experts(shared_width=shared_by_count)


def layer_kinds(config: Config) -> list[str]:
    """From layer_types, else compress_ratios, else transformers' default: two heavy layers, then heavy and sparse."""
    kinds = config.per_layer("layer_types", allowed=(SLIDING, SPARSE, HEAVY))
    if kinds:
        return kinds
    ratios = config.integers("compress_ratios")
    if ratios is None:
        return [SPARSE if layer > 2 and layer % 2 else HEAVY for layer in range(config.layers)]
    if len(ratios) < config.layers or not set(ratios) <= RATIO_KINDS.keys():
        raise config.error(f"compress_ratios must hold 0, 4 or 128 for each of {config.layers} layers.")
    return [RATIO_KINDS[ratio] for ratio in ratios[: config.layers]]


def compression(config: Config, kind: str) -> int:
    """Tokens folded into one compressed key."""
    if kind == SLIDING:
        return 1
    rates = config.get("compress_rates") or {}
    legacy = config.optional_size("compress_rate_csa" if kind == SPARSE else "compress_rate_hca")
    rate = legacy or (rates.get(kind) if isinstance(rates, dict) else None) or (4 if kind == SPARSE else 128)
    if not isinstance(rate, int) or rate < 1:
        raise config.error(f"compress_rates of {kind} is {rate!r}, wanted a positive integer.")
    return rate


def blocks(config: Config) -> list[Block]:
    return [block(config, kind=kind) for kind in layer_kinds(config)]


def mtp_blocks(config: Config) -> list[Block]:
    """A sliding-window block, two projections that join embedding and state, three norms and a head of its own.

    From the tensor listing of the published V4-Pro checkpoint; embeddings and output head are shared with the model.
    """
    hidden = config.hidden
    inner = block(config, kind=SLIDING)
    joint = group("mtp", linear("e_proj", hidden, hidden), linear("h_proj", hidden, hidden))
    groups = (*inner.groups, joint, norms(hidden, count=3), hyper_head(config))
    return [Block(layer=inner.layer, groups=groups)] * config.mtp_layers


def block(config: Config, *, kind: str) -> Block:
    attention, mixing = compressed_attention(config, kind=kind)
    mlp, parts = sparse_mlp(config, EXPERTS, bias=config.flag("mlp_bias"))
    return Block(
        layer=Layer(attention=attention, mlp=mlp),
        groups=(mixing, *parts, norms(config.hidden, count=2), hyper_connections(config)),
    )


def hyper_connections(config: Config) -> TensorGroup:
    """Before attention and before the MLP: streams → weights for reading, writing and mixing the streams."""
    streams = config.size("hc_mult")
    mixes = (2 + streams) * streams
    return group("residual", extra=2 * (mixes * streams * config.hidden + mixes + 3))


def hyper_head(config: Config) -> TensorGroup:
    """Folds the streams into one before the last norm."""
    streams = config.size("hc_mult")
    return group("residual", extra=streams * streams * config.hidden + streams + 1)


def compressed_attention(config: Config, *, kind: str) -> tuple[Attention, TensorGroup]:
    """One key that is also the value, shared by all heads; a compressor, and under sparse attention an indexer."""
    hidden, heads, width = config.hidden, config.heads, config.size("head_dim")
    rank, groups, out_rank = config.size("q_lora_rank"), config.size("o_groups"), config.size("o_lora_rank")
    if heads * width % groups:
        raise config.error(f"o_groups {groups} does not divide {heads} heads × {width}.")
    rate = compression(config, kind)
    attention = Attention(
        kind="sliding" if kind == SLIDING else "compressed",
        heads=heads,
        kv_heads=1,
        qk_dim=width,
        v_dim=width,
        window_tokens=config.size("sliding_window"),
        q_rank=rank,
        rope_dim=rotary_width(config),
        compression=rate,
        index_heads=config.size("index_n_heads") if kind == SPARSE else 0,
        index_dim=config.size("index_head_dim") if kind == SPARSE else 0,
        index_top_k=config.size("index_topk") if kind == SPARSE else None,
    )
    compressor, taps = compressor_parts(config, attention, kind=kind)
    out_a = Linear(name="o_a_proj", inputs=heads * width // groups, outputs=out_rank, copies=groups, active=groups)
    return attention, group(
        "attention",
        linear("q_a_proj", hidden, rank),
        linear("q_b_proj", rank, heads * width),
        linear("kv_proj", hidden, width),
        out_a,
        linear("o_b_proj", groups * out_rank, hidden),
        *compressor,
        extra=rank + width + heads + taps,
    )


def rotary_width(config: Config) -> int:
    """Part of a head that carries positions: its own key, or a share of the head (an eighth)."""
    share = config.get("partial_rotary_factor")
    own = config.optional_size("qk_rope_head_dim")
    return own or int(config.size("head_dim") * (share if isinstance(share, float) else 0.125))


def compressor_parts(config: Config, attention: Attention, *, kind: str) -> tuple[tuple[Linear, ...], int]:
    """Linear modules of compressor and indexer, and their position biases and norms."""
    if kind == SLIDING:
        return (), 0
    hidden, width, rate = config.hidden, attention.qk_dim, attention.compression
    wide = width if kind == HEAVY else 2 * width
    linears = (linear("compressor.kv_proj", hidden, wide), linear("compressor.gate_proj", hidden, wide))
    taps = rate * wide + width
    if kind == HEAVY:
        return linears, taps
    index = attention.index_dim
    indexer = (
        linear("indexer.kv_proj", hidden, 2 * index),
        linear("indexer.gate_proj", hidden, 2 * index),
        linear("indexer.q_b_proj", config.size("q_lora_rank"), attention.index_heads * index),
        linear("indexer.weights_proj", hidden, attention.index_heads),
    )
    return (*linears, *indexer), taps + rate * 2 * index + index
