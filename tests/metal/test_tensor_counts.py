"""Every family, in several sizes, counted by formula and built by transformers on the meta device: equal by role."""

import dataclasses
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gatewright.planner import architecture_config, architecture_families
from gatewright.planner.architecture import read_shape
from gatewright.planner.catalogue import Entry, models
from gatewright.planner.tensors_roles import role_of

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "vocab_size": 160,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
GQA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 96}
MOE: dict[str, Any] = {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIX: dict[str, Any] = {**GQA, "num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {**GQA, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
KIMI: dict[str, Any] = {key: value for key, value in LATENT.items() if key != "n_routed_experts"} | {"num_experts": 8}
DELTA: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "head_dim": 24,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}
DELTA_MOE: dict[str, Any] = {
    **DELTA,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
V4: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 24,
    "head_dim": 32,
    "q_lora_rank": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 10,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "index_topk": 8,
}
MAMBA: dict[str, Any] = {
    **MIX,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_head": "auto",
    "shared_intermediate_size": 40,
}
NEMOTRON: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        GQA,
        {**GQA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {**GQA, "head_dim": 24, "num_key_value_heads": 4, "hidden_size": 128},
        {"hidden_size": 64, "num_hidden_layers": 2},
    ],
    "granite": [GQA, {**GQA, "attention_bias": True}, {**GQA, "tie_word_embeddings": True, "mlp_bias": True}],
    "smollm3": [GQA, {**GQA, "tie_word_embeddings": False}, {**GQA, "attention_bias": True, "mlp_bias": True}],
    "mistral": [GQA, {**GQA, "head_dim": 24}, {**GQA, "sliding_window": None, "tie_word_embeddings": True}],
    "ministral3": [GQA, {**GQA, "head_dim": 24}, {**GQA, "tie_word_embeddings": True}],
    "gemma": [GQA, {**GQA, "tie_word_embeddings": False}, {**GQA, "attention_bias": True, "head_dim": 24}],
    "gemma2": [GQA, {**GQA, "tie_word_embeddings": False}, {**GQA, "attention_bias": True, "head_dim": 24}],
    "gemma3_text": [GQA, {**GQA, "sliding_window_pattern": 2}, {**GQA, "tie_word_embeddings": False, "head_dim": 24}],
    "phi3": [GQA, {**GQA, "num_key_value_heads": 4}, {**GQA, "tie_word_embeddings": True, "sliding_window": 8}],
    "olmo2": [GQA, {**GQA, "num_key_value_heads": 4}, {**GQA, "attention_bias": True, "tie_word_embeddings": True}],
    "glm4": [GQA, {**GQA, "attention_bias": False}, {**GQA, "head_dim": 24, "tie_word_embeddings": True}],
    "ernie4_5": [GQA, {**GQA, "use_bias": True}, {**GQA, "tie_word_embeddings": False, "head_dim": 24}],
    "qwen2": [
        GQA,
        {**GQA, "tie_word_embeddings": True},
        {**GQA, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
    ],
    "qwen3": [GQA, {**GQA, "head_dim": 24, "tie_word_embeddings": True}, {**GQA, "attention_bias": True}],
    "qwen2_moe": [
        {**MOE, "shared_expert_intermediate_size": 40},
        {**MOE, "decoder_sparse_step": 2, "qkv_bias": False},
        {**MOE, "mlp_only_layers": [0, 3], "tie_word_embeddings": True},
    ],
    "qwen3_moe": [
        MOE,
        {**MOE, "decoder_sparse_step": 2, "head_dim": 24},
        {**MOE, "mlp_only_layers": [1, 2], "attention_bias": True, "tie_word_embeddings": True},
    ],
    "mixtral": [MIX, {**MIX, "head_dim": 24, "tie_word_embeddings": True}, {**MIX, "sliding_window": 16}],
    "olmoe": [MOE, {**MOE, "attention_bias": True}, {**MOE, "num_key_value_heads": 4, "tie_word_embeddings": True}],
    "granitemoe": [MIX, {**MIX, "attention_bias": True}, {**MIX, "tie_word_embeddings": True, "num_local_experts": 4}],
    "granitemoeshared": [MIX, {**MIX, "shared_intermediate_size": 40}, {**MIX, "attention_bias": True}],
    "ernie4_5_moe": [
        {**GQA, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24},
        {**GQA, "moe_num_experts": 8, "moe_k": 2, "use_bias": True, "tie_word_embeddings": False},
        {**GQA, "moe_num_experts": 8, "moe_k": 2, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
        {**GQA, "moe_num_experts": 8, "moe_layer_start_index": 2, "moe_layer_end_index": 4, "use_bias": True},
    ],
    "glm4_moe": [
        ROUTED,
        {**ROUTED, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 24},
        {**ROUTED, "n_shared_experts": 2, "tie_word_embeddings": True},
    ],
    "gpt_oss": [MIX, {**MIX, "attention_bias": False, "head_dim": 24}, {**MIX, "tie_word_embeddings": True}],
    "llama4_text": [
        {**MIX, "intermediate_size_mlp": 80},
        {**MIX, "interleave_moe_layer_step": 2, "head_dim": 24},
        {**MIX, "moe_layers": [0, 4], "attention_bias": True, "tie_word_embeddings": True},
    ],
    "minimax_m2": [MIX, {**MIX, "head_dim": 24}, {**MIX, "tie_word_embeddings": True, "num_local_experts": 4}],
    "phimoe": [MIX, {**MIX, "attention_bias": True, "lm_head_bias": True}, {**MIX, "tie_word_embeddings": True}],
    "deepseek_v2": [
        LATENT,
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
        {**LATENT, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0},
    ],
    "deepseek_v3": [
        LATENT,
        {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 3},
        {**LATENT, "attention_bias": True, "tie_word_embeddings": True, "n_shared_experts": 2},
    ],
    "deepseek_v32": [
        {**LATENT, "index_n_heads": 3, "index_head_dim": 16},
        {**LATENT, "first_k_dense_replace": 4, "attention_bias": True},
        {**LATENT, "mlp_layer_types": ["sparse", "dense"] * 3, "tie_word_embeddings": True},
    ],
    "glm4_moe_lite": [
        LATENT,
        {**LATENT, "q_lora_rank": None},
        {**LATENT, "mlp_layer_types": ["dense", "dense", *["sparse"] * 4], "attention_bias": True},
    ],
    "glm_moe_dsa": [
        {**LATENT, "index_n_heads": 3, "index_head_dim": 16},
        {**LATENT, "indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
        {**LATENT, "index_topk_freq": 3, "index_skip_topk_offset": 1, "attention_bias": True},
        {**LATENT, "index_topk_pattern": "FSSFSF", "tie_word_embeddings": True},
    ],
    "deepseek_v4": [
        V4,
        {**V4, "compress_ratios": [0, 0, 4, 128, 4, 128, 4], "num_hash_layers": 1, "mlp_bias": True},
        {**V4, "layer_types": ["sliding_attention", "compressed_sparse_attention"] * 3 + ["sliding_attention"]},
        {**V4, "hc_mult": 2, "n_shared_experts": 1, "compress_rate_csa": 2, "compress_rate_hca": 16},
    ],
    "qwen3_next": [
        DELTA_MOE,
        {**DELTA_MOE, "decoder_sparse_step": 2, "full_attention_interval": 3, "attention_bias": True},
        {**DELTA_MOE, "mlp_only_layers": [0, 5], "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    ],
    "qwen3_5_text": [
        DELTA,
        {**DELTA, "full_attention_interval": 2, "attention_bias": True, "tie_word_embeddings": True},
        {**DELTA, "layer_types": ["full_attention", *["linear_attention"] * 5]},
    ],
    "qwen3_5_moe_text": [
        DELTA_MOE,
        {**DELTA_MOE, "full_attention_interval": 2, "tie_word_embeddings": True},
        {**DELTA_MOE, "layer_types": ["full_attention", *["linear_attention"] * 5], "attention_bias": True},
    ],
    "minimax": [
        MIX,
        {**MIX, "head_dim": 24, "layer_types": [*["linear_attention"] * 5, "full_attention"]},
        {**MIX, "tie_word_embeddings": True, "num_local_experts": 4},
    ],
    "kimi_linear": [
        {**KIMI, "linear_head_dim": 12, "linear_num_heads": 5},
        {**KIMI, "q_lora_rank": None, "first_k_dense_replace": 2, "tie_word_embeddings": True},
        {
            **KIMI,
            "linear_attn_config": {
                "head_dim": 10,
                "num_heads": 3,
                "short_conv_kernel_size": 2,
                "full_attn_layers": [2, 6],
                "kda_layers": [1, 3, 4, 5],
            },
        },
    ],
    "granitemoehybrid": [
        MAMBA,
        {**MAMBA, "layer_types": ["mamba", "attention"] * 3, "attention_bias": True, "mamba_proj_bias": True},
        {**MAMBA, "num_local_experts": 0, "tie_word_embeddings": True, "mamba_conv_bias": False},
    ],
    "nemotron_h": [
        {**NEMOTRON, "hybrid_override_pattern": "ME*-ME"},
        {**NEMOTRON, "hybrid_override_pattern": "ME*-ME", "moe_latent_size": 20, "mlp_bias": True},
        {**NEMOTRON, "hybrid_override_pattern": "M-M*M-", "tie_word_embeddings": True},
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"], "use_bias": True},
    ],
}

CASES = [
    pytest.param(family, variant, id=f"{family}-{index}")
    for family, variants in VARIANTS.items()
    for index, variant in enumerate(variants)
]


def meta_model(config: transformers.PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def roles_of(model: torch.nn.Module) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[role_of(name)] += parameter.numel()
    if "router" not in counts and "shared_experts" in counts:  # Granite 4's dense models
        counts["dense_mlp"] += counts.pop("shared_experts")
    return dict(counts)


def same_counts(values: dict[str, Any], config: transformers.PreTrainedConfig) -> None:
    shape, built = read_shape(values), meta_model(config)
    counted = {role: count for role, count in shape.parameters_by_role().items() if role != "mtp"}
    merge_linear_attention(counted)
    measured = roles_of(built)
    merge_linear_attention(measured)
    assert counted == measured
    assert shape.parameters == sum(parameter.numel() for parameter in built.parameters())


def merge_linear_attention(counts: dict[str, int]) -> None:
    """Parameter names do not always tell the two kinds of attention apart (MiniMax, Kimi Linear)."""
    if "linear_attention" in counts:
        counts["attention"] = counts.get("attention", 0) + counts.pop("linear_attention")


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_formula_equals_transformers(family: str, variant: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[family](**variant)
    same_counts({"model_type": family, **variant}, config)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_saved_config_reads_the_same(family: str, variant: dict[str, Any], tmp_path: Path) -> None:
    """transformers renames keys and fills in others when it saves: both spellings give one shape."""
    CONFIG_MAPPING[family](**variant).save_pretrained(tmp_path)
    saved, written = read_shape(tmp_path), read_shape({"model_type": family, **variant})
    assert saved.groups == written.groups
    assert saved.layers == written.layers


CATALOGUE = list({json.dumps(dict(entry.config), sort_keys=True): entry for entry in models()}.values())
"""One model a shape: R1 is V3."""


@pytest.mark.parametrize("entry", CATALOGUE, ids=[entry.name for entry in CATALOGUE])
def test_catalogue_model_in_full_size(entry: Entry) -> None:
    """Real sizes, on the meta device: no memory is used."""
    outer = dict(entry.config)
    text = {"model_type": outer["model_type"], **outer.get("text_config", outer)}
    family = architecture_families.ALIASES.get(text["model_type"], text["model_type"])
    settings = {key: value for key, value in text.items() if key not in ("model_type", "quantization_config")}
    settings.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", True))
    same_counts(outer, CONFIG_MAPPING[family](**settings))


def test_every_family_is_tested_in_three_variants() -> None:
    assert set(VARIANTS) == set(architecture_families.FAMILIES)
    assert all(len(variants) >= 3 for variants in VARIANTS.values())


def test_linear_modules_are_transformers() -> None:
    """What adapters can target by module is what the built model has, with its sizes."""
    for family, variants in VARIANTS.items():
        model = meta_model(CONFIG_MAPPING[family](**variants[0]))
        built = Counter(
            (name.rsplit(".", 1)[-1], module.in_features, module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        )
        counted: Counter[tuple[str, int, int]] = Counter()
        for group in read_shape({"model_type": family, **variants[0]}).groups:
            for linear in group.linears:
                if linear.module and group.role not in ("head", "mtp", "routed_experts"):
                    name = linear.name.rsplit(".", 1)[-1]
                    counted[name, linear.inputs, linear.outputs * linear.copies] += 1
        routers = {key: count for key, count in built.items() if key[0] == "router"}
        assert {("gate" if key[0] == "router" else key[0], *key[1:]): n for key, n in built.items()} == counted, family
        assert not routers or family in ("llama4_text", "phimoe")


def transformers_defaults() -> dict[str, dict[str, Any]]:
    """What each config class fills in, for the keys that the readers ask for."""
    folder = Path(architecture_config.__file__).parent
    sources = "".join(path.read_text() for path in sorted(folder.glob("architecture*.py")))
    asked = set(re.findall(r'"([a-z][a-z0-9_]+)"', sources)) - {"model_type"}
    families = sorted({*architecture_families.FAMILIES, *architecture_families.ALIASES} & set(CONFIG_MAPPING.keys()))
    return {
        family: {
            field.name: field.default
            for field in dataclasses.fields(CONFIG_MAPPING[family])
            if field.name in asked and type(field.default) in (bool, int, str)
        }
        for family in families
    }


def test_defaults_are_those_of_transformers() -> None:
    """Run this file with --write after an upgrade of transformers."""
    assert architecture_config.family_defaults() == transformers_defaults()


if __name__ == "__main__" and "--write" in sys.argv:
    document = {
        "source": f"transformers {transformers.__version__} config classes",
        "families": transformers_defaults(),
    }
    architecture_config.DEFAULTS.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
