"""A tiny config of every architecture family we claim to train, small enough that each of its habits shows.

Windows, chunks, compression rates and top-k of indexers are shorter than the longest document, so a model that ignored
one of them, or counted it from the beginning of the row, would give other numbers.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT: dict[str, object] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
GROUPED: dict[str, object] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
QWEN_MOE: dict[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "head_dim": 16,
}
DELTA: dict[str, object] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LOCAL_MOE: dict[str, object] = {"num_local_experts": 8, "num_experts_per_tok": 2}
MAMBA: dict[str, object] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
GRANITE: dict[str, object] = {
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
}
INDEXER: dict[str, object] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 4}


@dataclass(frozen=True)
class Family:
    """A tiny model of one family, and what of it takes adapters."""

    config: dict[str, object]
    targets: tuple[str, ...] = ("attention", "experts")
    model_type: str | None = None
    """transformers' name where it differs from ours."""
    tied: bool = False


def _moe(*parts: dict[str, object], **more: object) -> Family:
    config: dict[str, object] = {}
    for part in parts:
        config |= part
    return Family(config | more)


def _dense(*parts: dict[str, object], **more: object) -> Family:
    return Family(_moe(*parts, **more).config, targets=("attention", "mlp"))


FAMILIES: dict[str, Family] = {
    "llama": _dense(),
    "mistral": _dense(sliding_window=4),
    "qwen2": _dense(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": _dense(head_dim=16),
    "gemma2": _dense(head_dim=16, sliding_window=4, query_pre_attn_scalar=16),
    "gemma3_text": _dense(head_dim=16, sliding_window=4, query_pre_attn_scalar=16),
    "phi": _dense(num_key_value_heads=4),
    "phi3": _dense(sliding_window=4),
    "lfm2": _dense(layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8),
    "falcon_h1": _dense(
        MAMBA, mamba_d_ssm=64, head_dim=8, lm_head_multiplier=0.5, ssm_multipliers=[1.0, 0.9, 1.1, 1.0, 0.8]
    ),
    "bamba": _dense(MAMBA, attn_layer_indices=[1]),
    "nemotron_h": Family(
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        }
    ),
    "granitemoehybrid": _moe(
        MAMBA,
        LOCAL_MOE,
        GRANITE,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=40,
    ),
    "jamba": Family(
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        }
    ),
    "mixtral": _moe(LOCAL_MOE, sliding_window=4),
    "olmoe": _moe(num_experts=8, num_experts_per_tok=2),
    "qwen2_moe": _moe(QWEN_MOE),
    "qwen3_moe": _moe(QWEN_MOE, norm_topk_prob=True, mlp_only_layers=[0]),
    "qwen3_next": _moe(QWEN_MOE, DELTA),
    "qwen3_5_moe": Family(QWEN_MOE | DELTA, model_type="qwen3_5_moe_text"),
    "deepseek_v2": _moe(LATENT, GROUPED, topk_method="group_limited_greedy"),
    "deepseek_v3": _moe(LATENT, GROUPED),
    "deepseek_v32": _moe(LATENT, GROUPED, INDEXER),
    "glm_moe_dsa": _moe(LATENT, GROUPED, INDEXER, indexer_types=["full", "shared", "full"]),
    "glm4_moe": _moe(GROUPED, head_dim=16, use_qk_norm=True),
    "deepseek_v4": Family(
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "hc_mult": 2,
            "sliding_window": 4,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 2,
            "partial_rotary_factor": 0.5,
        }
    ),
    "gpt_oss": _moe(LOCAL_MOE, head_dim=16, sliding_window=4),
    "granitemoe": _moe(
        LOCAL_MOE, logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=3.0, attention_multiplier=0.2
    ),
    "llama4": Family(
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "attention_chunk_size": 4,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 1],
            "attn_temperature_tuning": True,
            "floor_scale": 3,
            "attn_scale": 0.7,
        },
        model_type="llama4_text",
    ),
    "minimax": _moe(LOCAL_MOE, head_dim=8, layer_types=["linear_attention", "full_attention"], block_size=4),
    "minimax_m2": _moe(LOCAL_MOE, head_dim=16, rotary_dim=8),
    "ernie4_5_moe": _moe(moe_num_experts=8, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1),
    "afmoe": _moe(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        num_dense_layers=1,
        num_shared_experts=1,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm4_moe_lite": _moe(LATENT, GROUPED),
    "hy_v4": _moe(LATENT, GROUPED, INDEXER, indexer_types=["full", "shared", "full"]),
    "mimo_v2_flash": _moe(
        GROUPED,
        head_dim=16,
        v_head_dim=12,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "bailing_hybrid": _moe(
        LATENT, GROUPED, LOCAL_MOE, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "kimi_linear": _moe(
        LATENT,
        LOCAL_MOE,
        q_lora_rank=None,
        moe_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=8,
        linear_num_heads=2,
        mlp_layer_types=["dense", "sparse"],
    ),
}


def save_family(name: str, folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Writes a random float32 model of the family: routers, norms and biases random enough to matter."""
    family = FAMILIES[name]
    model_type = family.model_type or name
    config = AutoConfig.for_model(model_type, **SIZES | family.config | changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("gate.weight", "router.weight")):
                parameter.normal_(std=0.5)
            elif "norm" in key:
                parameter.uniform_(0.7, 1.3)
            elif not key.endswith(("A_log", "dt_bias")):
                parameter.normal_(std=0.15)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                buffer.normal_(std=0.2)
            elif key.endswith("tid2eid"):
                buffer.random_(0, model.config.num_local_experts)
    model.save_pretrained(folder)
    return folder
