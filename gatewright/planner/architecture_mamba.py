"""Decoders with Mamba-2 layers: Granite 4 (a mixer and an MLP in each layer) and Nemotron-H (one of them a layer)."""

from gatewright.planner.architecture_config import Config
from gatewright.planner.architecture_grouped import FULL, Experts, Traits
from gatewright.planner.architecture_grouped import block as grouped_block
from gatewright.planner.architecture_hybrid import LINEAR_ATTENTION, mixers
from gatewright.planner.tensors import Block, gated_mlp, group, grouped_attention, linear, norms, plain_mlp, router
from gatewright.planner.tensors import routed_experts as experts_group
from gatewright.spec.shape import Attention, Layer, Mlp, TensorGroup

NEMOTRON_LETTERS = {"M": "linear_attention", "-": "mlp", "*": "full_attention", "E": "moe"}
NEMOTRON_WORDS = {"mamba": "linear_attention", "attention": "full_attention"}


def mamba_mixer(
    *, hidden: int, heads: int, width: int, state: int, groups: int, taps: int, bias: bool, conv_bias: bool
) -> tuple[Attention, TensorGroup]:
    """Mamba-2: `heads` heads of `width`, a state of `state` numbers for each of their elements."""
    inner = heads * width
    convolved = inner + 2 * groups * state
    attention = Attention(
        kind="linear", heads=heads, kv_heads=groups, qk_dim=state, v_dim=width, gated=True, conv_kernel=taps
    )
    return attention, group(
        "linear_attention",
        linear("in_proj", hidden, inner + convolved + heads, bias=bias),
        linear("out_proj", inner, hidden, bias=bias),
        extra=convolved * (taps + conv_bias) + 3 * heads + inner,
    )


def granite_blocks(config: Config, traits: Traits) -> list[Block]:
    """Every layer has a shared MLP; layers have routed experts where num_local_experts is not 0."""
    return [
        granite_block(config, traits, kind=kind) for kind in mixers(config, default=[LINEAR_ATTENTION] * config.layers)
    ]


def granite_block(config: Config, traits: Traits, *, kind: str) -> Block:
    hidden, experts = config.hidden, config.count("num_experts")
    if kind == LINEAR_ATTENTION:
        heads = config.size("mamba_n_heads")
        inner = config.size("mamba_expand") * hidden
        width = inner // heads if config.get("mamba_d_head") == "auto" else config.size("mamba_d_head")
        attention, mixing = mamba_mixer(
            hidden=hidden,
            heads=heads,
            width=width,
            state=config.size("mamba_d_state"),
            groups=config.size("mamba_n_groups"),
            taps=config.size("mamba_d_conv"),
            bias=config.flag("mamba_proj_bias"),
            conv_bias=config.flag("mamba_conv_bias"),
        )
    else:
        block = grouped_block(config, traits, window=FULL, moe=False)
        assert block.layer.attention is not None
        attention, mixing = block.layer.attention, block.groups[0]
    shared = config.size("shared_intermediate_size")
    names = ("input_linear", "output_linear")
    if not experts:
        mlp = Mlp(kind="dense", width=shared)
        parts = [gated_mlp("dense_mlp", hidden=hidden, width=shared, fused=True, names=names)]
    else:
        mlp = Mlp(
            kind="moe",
            width=config.size("intermediate_size"),
            experts=experts,
            top_k=config.size("num_experts_per_tok"),
            shared_width=shared,
        )
        parts = [
            router(mlp, hidden=hidden),
            experts_group(mlp, hidden=hidden),
            gated_mlp("shared_experts", hidden=hidden, width=shared, fused=True, names=names),
        ]
    layer = Layer(attention=attention, mlp=mlp)
    return Block(layer=layer, groups=(mixing, *parts, norms(hidden, count=2)))


def nemotron_blocks(config: Config) -> list[Block]:
    pattern = config.text("hybrid_override_pattern")
    allowed = (*NEMOTRON_LETTERS.values(), *NEMOTRON_WORDS)
    words = config.per_layer("layer_types", allowed=allowed)
    if words is None:
        if pattern is None or len(pattern) < config.layers or not set(pattern) <= NEMOTRON_LETTERS.keys():
            raise config.error("hybrid_override_pattern must hold one of M, E, *, - for each layer.")
        words = [NEMOTRON_LETTERS[letter] for letter in pattern[: config.layers]]
    return [nemotron_block(config, kind=NEMOTRON_WORDS.get(word, word)) for word in words]


def nemotron_block(config: Config, *, kind: str) -> Block:
    hidden = config.hidden
    norm = norms(hidden, count=1)
    if kind == "linear_attention":
        attention, mixing = mamba_mixer(
            hidden=hidden,
            heads=config.size("mamba_num_heads"),
            width=config.size("mamba_head_dim"),
            state=config.size("ssm_state_size"),
            groups=config.size("n_groups"),
            taps=config.size("conv_kernel"),
            bias=config.flag("use_bias"),
            conv_bias=config.flag("use_conv_bias"),
        )
        return Block(layer=Layer(attention=attention, mlp=None), groups=(mixing, norm))
    if kind == "full_attention":
        width = config.head_dim
        full = Attention(kind="full", heads=config.heads, kv_heads=config.kv_heads, qk_dim=width, v_dim=width)
        return Block(layer=Layer(attention=full, mlp=None), groups=(grouped_attention(full, hidden=hidden), norm))
    mlp, parts = nemotron_experts(config) if kind == "moe" else nemotron_mlp(config)
    return Block(layer=Layer(attention=None, mlp=mlp), groups=(*parts, norm))


def nemotron_mlp(config: Config) -> tuple[Mlp, tuple[TensorGroup, ...]]:
    """Squared ReLU, no gate."""
    width = config.size("intermediate_size")
    mlp = Mlp(kind="dense", width=width, matrices=2)
    return mlp, (plain_mlp("dense_mlp", hidden=config.hidden, width=width, bias=config.flag("mlp_bias")),)


def nemotron_experts(config: Config) -> tuple[Mlp, tuple[TensorGroup, ...]]:
    """Experts without gates, optionally in a narrower latent space (moe_latent_size)."""
    hidden, bias = config.hidden, config.flag("mlp_bias")
    latent = config.optional_size("moe_latent_size")
    mlp = Mlp(
        kind="moe",
        width=config.size("moe_intermediate_size"),
        matrices=2,
        experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        shared_width=config.size("moe_shared_expert_intermediate_size"),
    )
    shared = plain_mlp("shared_experts", hidden=hidden, width=mlp.shared_width, bias=bias)
    parts = [router(mlp, hidden=hidden), experts_group(mlp, hidden=latent or hidden), shared]
    if latent:
        ends = (
            linear("fc1_latent_proj", hidden, latent, bias=bias),
            linear("fc2_latent_proj", latent, hidden, bias=bias),
        )
        parts.append(group("dense_mlp", *ends))
    return mlp, tuple(parts)


GRANITE_ATTENTION = Traits(qkv_bias="attention_bias", out_bias="attention_bias", experts=Experts())
