"""Which builder reads which model_type: one line of traits, or one function, for each family."""

from collections.abc import Callable
from dataclasses import replace

from gatewright.planner import architecture_compressed as compressed
from gatewright.planner import architecture_grouped as grouped
from gatewright.planner import architecture_hybrid as hybrid
from gatewright.planner import architecture_latent as latent
from gatewright.planner import architecture_mamba as mamba
from gatewright.planner.architecture_config import Config
from gatewright.planner.architecture_grouped import Experts, Traits, switched
from gatewright.planner.tensors import Block, assemble, group, linear, norms
from gatewright.spec.shape import ModelShape

Builder = Callable[[Config, ModelShape], ModelShape]

QWEN_EXPERTS = Experts(layers=grouped.every_nth_layer)
QWEN_SHARED = Experts(
    layers=grouped.every_nth_layer,
    shared_width=lambda config: config.size("shared_expert_intermediate_size"),
    shared_gate=True,
)
GRANITE_NAMES = ("input_linear", "output_linear")
ALL_BIAS = Traits(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")

GROUPED: dict[str, Traits] = {
    "llama": ALL_BIAS,
    "granite": ALL_BIAS,
    "smollm3": ALL_BIAS,
    "mistral": Traits(windows=grouped.sliding_everywhere),
    "ministral3": Traits(windows=grouped.sliding_everywhere),
    "gemma": Traits(qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma2": Traits(
        windows=grouped.sliding_alternating, qkv_bias="attention_bias", out_bias="attention_bias", norms=4
    ),
    "gemma3_text": Traits(
        windows=grouped.sliding_five_of_six,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        norms=4,
    ),
    "phi3": Traits(windows=grouped.sliding_everywhere, fused=True),
    "olmo2": Traits(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="full"),
    "glm4": Traits(qkv_bias="attention_bias", fused_mlp=True, norms=4),
    "ernie4_5": Traits(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "qwen2": Traits(windows=grouped.sliding_above, qkv_bias=True),
    "qwen3": Traits(
        windows=grouped.sliding_above, qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"
    ),
    "qwen2_moe": Traits(windows=grouped.sliding_even_below, qkv_bias="qkv_bias", experts=QWEN_SHARED),
    "qwen3_moe": Traits(
        windows=grouped.sliding_if_used,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        experts=QWEN_EXPERTS,
    ),
    "mixtral": Traits(windows=grouped.sliding_everywhere, experts=Experts(width="intermediate_size")),
    "olmoe": Traits(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="full",
        experts=Experts(width="intermediate_size"),
    ),
    "granitemoe": Traits(
        qkv_bias="attention_bias", out_bias="attention_bias", experts=Experts(width="intermediate_size")
    ),
    "granitemoeshared": Traits(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        experts=Experts(
            width="intermediate_size",
            shared_width=lambda config: config.count("shared_intermediate_size"),
            shared_names=GRANITE_NAMES,
        ),
    ),
    "ernie4_5_moe": Traits(
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        experts=Experts(layers=grouped.ernie_layers, shared_width=grouped.shared_by_count, correction_bias=True),
    ),
    "glm4_moe": Traits(
        qkv_bias="attention_bias",
        qk_norm="optional",
        experts=Experts(layers=grouped.after_dense_layers, shared_width=grouped.shared_by_count),
        mtp=True,
    ),
    "gpt_oss": Traits(
        windows=grouped.sliding_alternating,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks=True,
        experts=Experts(width="intermediate_size", bias=True),
    ),
    "llama4_text": Traits(
        windows=grouped.chunked,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        dense_width="intermediate_size_mlp",
        experts=Experts(
            layers=grouped.llama4_layers,
            width="intermediate_size",
            shared_width=lambda config: config.size("intermediate_size"),
            router_module=True,
        ),
    ),
    "minimax_m2": Traits(qk_norm="full", experts=Experts(width="intermediate_size")),
    "phimoe": Traits(
        windows=grouped.sliding_everywhere,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        norm_bias=True,
        head_bias="lm_head_bias",
        experts=Experts(width="intermediate_size", router_module=True),
    ),
}

LATENT: dict[str, tuple[Traits, bool]] = {
    "deepseek_v2": (Traits(mlp_bias="mlp_bias"), False),
    "deepseek_v3": (Traits(), False),
    "glm4_moe_lite": (Traits(), False),
    "deepseek_v32": (Traits(), True),
    "glm_moe_dsa": (Traits(), True),
}
"""Traits, and whether attention is sparse through an indexer."""

ALIASES = {
    "kimi_k2": "deepseek_v3",
    "minimax_text_01": "minimax",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
}
"""Families whose language model is another family's, layer for layer."""


def build_grouped(config: Config, shape: ModelShape) -> ModelShape:
    traits = GROUPED[config.family]
    extra: list[Block] = []
    if traits.mtp and traits.experts:
        window = traits.windows(config)[-1]
        extra = joined_mtp(config, shape, grouped.block(config, traits, window=window, moe=True))
    return assemble(
        replace(shape, logit_softcap=config.get("final_logit_softcapping") is not None),
        blocks=grouped.blocks(config, traits),
        mtp=extra,
        final=(norms(config.hidden, count=1, bias=traits.norm_bias),),
        head_bias=switched(config, traits.head_bias),
    )


def build_latent(config: Config, shape: ModelShape) -> ModelShape:
    traits, indexed = LATENT[config.family]
    block = latent.block(config, traits, moe=True, indexed=indexed, indexer=indexed)
    return assemble(
        shape,
        blocks=latent.blocks(config, traits, indexed=indexed),
        mtp=joined_mtp(config, shape, block),
    )


def build_compressed(config: Config, shape: ModelShape) -> ModelShape:
    return assemble(
        replace(shape, residual_streams=config.size("hc_mult")),
        blocks=compressed.blocks(config),
        mtp=compressed.mtp_blocks(config),
        final=(norms(config.hidden, count=1), compressed.hyper_head(config)),
    )


def build_delta(config: Config, shape: ModelShape) -> ModelShape:
    fused = config.family == "qwen3_next"
    experts = {"qwen3_next": QWEN_SHARED, "qwen3_5_moe_text": replace(QWEN_SHARED, layers=grouped.every_layer)}
    traits = Traits(experts=experts.get(config.family))
    count = 1 if fused else config.mtp_layers
    return assemble(
        shape,
        blocks=hybrid.delta_blocks(config, traits, fused=fused),
        mtp=hybrid.delta_mtp(config, traits, count=count),
    )


def build_minimax(config: Config, shape: ModelShape) -> ModelShape:
    traits = Traits(experts=Experts(width="intermediate_size"))
    return assemble(shape, blocks=hybrid.lightning_blocks(config, traits))


def build_kimi_linear(config: Config, shape: ModelShape) -> ModelShape:
    return assemble(shape, blocks=hybrid.kimi_blocks(config, Traits()))


def build_granite_hybrid(config: Config, shape: ModelShape) -> ModelShape:
    return assemble(shape, blocks=mamba.granite_blocks(config, mamba.GRANITE_ATTENTION))


def build_nemotron(config: Config, shape: ModelShape) -> ModelShape:
    return assemble(shape, blocks=mamba.nemotron_blocks(config))


def joined_mtp(config: Config, shape: ModelShape, block: Block) -> list[Block]:
    """MTP as DeepSeek-V3 and GLM ship it: a block, eh_proj, three norms, and copies of embedding and head.

    From the tensor names of the published checkpoints (`model.layers.61.*` of DeepSeek-V3).
    """
    hidden = shape.hidden
    joint = group("mtp", linear("eh_proj", 2 * hidden, hidden), extra=2 * shape.vocab * hidden)
    count = config.mtp_layers
    return [Block(layer=block.layer, groups=(*block.groups, joint, norms(hidden, count=3)))] * count


FAMILIES: dict[str, Builder] = {
    **dict.fromkeys(GROUPED, build_grouped),
    **dict.fromkeys(LATENT, build_latent),
    "deepseek_v4": build_compressed,
    "qwen3_next": build_delta,
    "qwen3_5_text": build_delta,
    "qwen3_5_moe_text": build_delta,
    "minimax": build_minimax,
    "kimi_linear": build_kimi_linear,
    "granitemoehybrid": build_granite_hybrid,
    "nemotron_h": build_nemotron,
}
