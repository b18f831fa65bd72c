"""Decoders with multi-head or grouped-query attention, dense and mixture-of-experts: one line of traits a family."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gatewright.planner.architecture_config import Config
from gatewright.planner.tensors import Block, gated_mlp, grouped_attention, norms, routed_experts, router
from gatewright.spec.shape import Attention, AttentionKind, Layer, Mlp, TensorGroup

Window = tuple[AttentionKind, int | None]
FULL: Window = ("full", None)


def full(config: Config) -> list[Window]:
    return [FULL] * config.layers


def sliding_everywhere(config: Config) -> list[Window]:
    """Mistral, Mixtral, Phi: a window, where the config has one, holds for every layer."""
    window = config.optional_size("sliding_window")
    return [FULL if window is None else ("sliding", window)] * config.layers


def sliding_if_used(config: Config) -> list[Window]:
    """Qwen3-MoE: as above, behind a switch."""
    return sliding_everywhere(config) if config.flag("use_sliding_window") else full(config)


def sliding_above(config: Config) -> list[Window]:
    """Qwen2 and Qwen3: full attention in the first max_window_layers, behind a switch; or a list."""
    first = config.count("max_window_layers") if config.flag("use_sliding_window") else config.layers
    return listed(config, lambda layer: layer >= first)


def sliding_even_below(config: Config) -> list[Window]:
    """Qwen2-MoE: every second layer of the first max_window_layers, behind a switch; or a list."""
    first = config.count("max_window_layers") if config.flag("use_sliding_window") else 0
    return listed(config, lambda layer: layer % 2 == 0 and layer < first)


def sliding_alternating(config: Config) -> list[Window]:
    """Gemma 2 and gpt-oss: every second layer, from the first on; or a list."""
    return listed(config, lambda layer: layer % 2 == 0)


def sliding_five_of_six(config: Config) -> list[Window]:
    """Gemma 3: all but every sliding_window_pattern-th layer; or a list."""
    pattern = config.optional_size("sliding_window_pattern") or 6
    return listed(config, lambda layer: (layer + 1) % pattern != 0)


def listed(config: Config, slides: Callable[[int], bool]) -> list[Window]:
    """From layer_types where the config has them, else by the family's rule."""
    types = config.per_layer("layer_types", allowed=("full_attention", "sliding_attention"))
    chosen = [types[layer] == "sliding_attention" if types else slides(layer) for layer in range(config.layers)]
    window = config.size("sliding_window") if any(chosen) else None
    return [("sliding", window) if sliding else FULL for sliding in chosen]


def chunked(config: Config) -> list[Window]:
    """Llama 4: chunked attention in the layers with rotary positions, full attention in the others."""
    interval = config.optional_size("no_rope_layer_interval") or 4
    types = config.per_layer("layer_types", allowed=("full_attention", "chunked_attention"))
    rotary = config.integers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(config.layers)]
    chunk = config.optional_size("attention_chunk_size")
    return [
        ("chunked", chunk) if (types[layer] == "chunked_attention" if types else chunk and rotary[layer]) else FULL
        for layer in range(config.layers)
    ]


def every_layer(config: Config) -> list[bool]:
    return [True] * config.layers


def every_nth_layer(config: Config) -> list[bool]:
    """Qwen: every decoder_sparse_step-th layer, but those in mlp_only_layers."""
    step, dense = config.optional_size("decoder_sparse_step") or 1, config.integers("mlp_only_layers") or []
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.layers)]


def after_dense_layers(config: Config) -> list[bool]:
    """GLM and DeepSeek: the first first_k_dense_replace layers are dense."""
    first = config.count("first_k_dense_replace")
    types = config.per_layer("mlp_layer_types", allowed=("dense", "sparse"))
    return [types[layer] == "sparse" if types else layer >= first for layer in range(config.layers)]


def ernie_layers(config: Config) -> list[bool]:
    """ERNIE 4.5: every moe_layer_interval-th layer from start to end."""
    interval = config.optional_size("moe_layer_interval") or 1
    start = config.count("moe_layer_start_index")
    end = config.get("moe_layer_end_index")
    last = config.layers - 1 if end in (None, -1) else config.count("moe_layer_end_index")
    return [(layer + 1) % interval == 0 and start <= layer <= last for layer in range(config.layers)]


def llama4_layers(config: Config) -> list[bool]:
    """Llama 4: every interleave_moe_layer_step-th layer, or a list."""
    step = config.optional_size("interleave_moe_layer_step") or 1
    chosen = config.integers("moe_layers")
    if chosen is None:
        chosen = list(range(step - 1, config.layers, step))
    return [layer in chosen for layer in range(config.layers)]


def shared_by_count(config: Config) -> int:
    """Shared experts are each as wide as a routed one."""
    return config.size("moe_intermediate_size") * config.count("n_shared_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a family builds its MoE layers."""

    layers: Callable[[Config], list[bool]] = every_layer
    width: str = "moe_intermediate_size"
    """Config key of one routed expert's inner width."""
    shared_width: Callable[[Config], int] = lambda config: 0
    shared_gate: bool = False
    shared_names: tuple[str, str] | None = None
    """Names of a shared MLP that fuses gate and up (Granite)."""
    router_module: bool = False
    """The router is a linear module, not a bare parameter."""
    bias: bool = False
    """Router and experts have biases (gpt-oss)."""
    correction_bias: bool = False
    """A selection bias per expert is a parameter (ERNIE 4.5), not a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a family departs from Llama. A trait that is a string is the config key that switches it on."""

    windows: Callable[[Config], list[Window]] = full
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: Literal["none", "head", "full", "optional"] = "none"
    """A norm on each head, on all heads together, or on each head if the config's use_qk_norm says so."""
    sinks: bool = False
    """A learned sink per head (gpt-oss)."""
    mlp_bias: bool | str = False
    fused: bool = False
    """qkv_proj and gate_up_proj are one module each (Phi-3)."""
    fused_mlp: bool = False
    dense_width: str = "intermediate_size"
    norms: int = 2
    norm_bias: bool = False
    head_bias: bool | str = False
    experts: Experts | None = None
    mtp: bool = False
    """MTP layers of the checkpoint are laid out as DeepSeek-V3's: a MoE block, its norms, copies of both embeddings."""


def switched(config: Config, trait: bool | str) -> bool:
    return config.flag(trait) if isinstance(trait, str) else trait


def blocks(config: Config, traits: Traits) -> list[Block]:
    """The decoder's layers, in order."""
    sparse = traits.experts.layers(config) if traits.experts else [False] * config.layers
    return [
        block(config, traits, window=window, moe=moe)
        for window, moe in zip(traits.windows(config), sparse, strict=True)
    ]


def block(config: Config, traits: Traits, *, window: Window, moe: bool) -> Block:
    kind, window_tokens = window
    attention = Attention(
        kind=kind,
        heads=config.heads,
        kv_heads=config.kv_heads,
        qk_dim=config.head_dim,
        v_dim=config.head_dim,
        window_tokens=window_tokens,
    )
    mixing = grouped_attention(
        attention,
        hidden=config.hidden,
        qkv_bias=switched(config, traits.qkv_bias),
        out_bias=switched(config, traits.out_bias),
        extra=attention_extra(config, traits, attention=attention),
        fused=traits.fused,
    )
    bias = switched(config, traits.mlp_bias)
    mlp, parts = sparse_mlp(config, traits.experts, bias=bias) if moe and traits.experts else dense_mlp(config, traits)
    layer_norms = norms(config.hidden, count=traits.norms, bias=traits.norm_bias)
    return Block(layer=Layer(attention=attention, mlp=mlp), groups=(mixing, *parts, layer_norms))


def attention_extra(config: Config, traits: Traits, *, attention: Attention) -> int:
    """Norm weights of queries and keys, and sinks."""
    sinks = attention.heads if traits.sinks else 0
    if traits.qk_norm == "head" or (traits.qk_norm == "optional" and config.flag("use_qk_norm")):
        return 2 * attention.qk_dim + sinks
    if traits.qk_norm == "full":
        return (attention.heads + attention.kv_heads) * attention.qk_dim + sinks
    return sinks


def dense_mlp(config: Config, traits: Traits) -> tuple[Mlp, tuple[TensorGroup, ...]]:
    width = config.size(traits.dense_width)
    bias = switched(config, traits.mlp_bias)
    fused = traits.fused or traits.fused_mlp
    return Mlp(kind="dense", width=width), (
        gated_mlp("dense_mlp", hidden=config.hidden, width=width, bias=bias, fused=fused),
    )


def sparse_mlp(config: Config, experts: Experts, *, bias: bool = False) -> tuple[Mlp, tuple[TensorGroup, ...]]:
    """Router, routed experts and shared experts; `bias` is the shared experts' own."""
    mlp = Mlp(
        kind="moe",
        width=config.size(experts.width),
        experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        shared_width=experts.shared_width(config),
    )
    if mlp.top_k > mlp.experts:
        raise config.error(f"num_experts_per_tok is {mlp.top_k}, more than the {mlp.experts} experts there are.")
    parts = [
        router(
            mlp,
            hidden=config.hidden,
            bias=experts.bias,
            module=experts.router_module,
            shared_gate=experts.shared_gate,
            extra=mlp.experts if experts.correction_bias else 0,
        ),
        routed_experts(mlp, hidden=config.hidden, bias=experts.bias),
    ]
    if mlp.shared_width:
        parts.append(
            gated_mlp(
                "shared_experts",
                hidden=config.hidden,
                width=mlp.shared_width,
                bias=bias,
                fused=experts.shared_names is not None,
                names=experts.shared_names or ("gate_up_proj", "down_proj"),
            )
        )
    return mlp, tuple(parts)
