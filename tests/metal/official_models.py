"""Tiny models of architectures that go to GGUF through llama.cpp's own converter, and where that converter lies."""

import sys
from pathlib import Path

from export_models import SIZES
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

CONVERTER = Path(sys.prefix) / "llama.cpp" / "convert_hf_to_gguf.py"
"""Where `make test` puts it, from the source archive of llama-cpp-python."""
LATENT = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "num_key_value_heads": 4, "moe_intermediate_size": 256, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
HYBRID = {
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "num_hidden_layers": 4,
}  # fmt: skip
HYBRID_ROUTED = HYBRID | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "deepseek_v2": DeepseekV2Config(
        **SIZES | LATENT, n_routed_experts=4, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | LATENT, n_routed_experts=4, n_group=1, topk_group=1, norm_topk_prob=True, scoring_func="sigmoid"
    ),
    "qwen3_next": Qwen3NextConfig(**SIZES | HYBRID_ROUTED, norm_topk_prob=True),
    "qwen3_5": Qwen3_5TextConfig(**SIZES | HYBRID),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES | HYBRID_ROUTED),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=64, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, head_dim=64, moe_intermediate_size=256, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, partial_rotary_factor=0.5,
    ),
}  # fmt: skip
