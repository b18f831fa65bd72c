"""A tensor's role, from its name: in transformers' models, and in checkpoints as they are published."""

import re

from gatewright.spec.shape import TensorRole

PATTERNS: tuple[tuple[TensorRole, str], ...] = (
    ("vision", r"(^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal_projector|mm_projector)\."),
    ("mtp", r"(^|\.)mtp(_block|_layers)?(\.|$)|(^|\.)(eh_proj|enorm|hnorm|shared_head)(\.|$)"),
    ("residual", r"(^|\.)(attn_hc|ffn_hc|hc_head)\.|(^|\.)hc_(attn|ffn|head)_"),
    ("shared_experts", r"(^|\.)(shared_experts?|shared_mlp)(\.|$)"),
    ("routed_experts", r"(^|\.)experts(\.|$)|(^|\.)block_sparse_moe\.(input|output)_linear\."),
    ("router", r"(^|\.)(gate|router|shared_expert_gate)\.|(^|\.)(e_score_correction_bias|moe_statics)"),
    ("linear_attention", r"(^|\.)(linear_attn|mamba)\."),
    ("attention", r"(^|\.)(self_attn|self_attention|attention|attn)\."),
    ("norms", r"(norm|norm_f|layernorm|ln_f|ln_1|ln_2)\d?\.(weight|bias)$"),
    ("embedding", r"(^|\.)(embed_tokens|embeddings|tok_embeddings|word_embeddings|wte|embed)\."),
    ("head", r"(^|\.)(lm_head|head|output)\."),
    ("dense_mlp", r"(^|\.)(mlp|feed_forward|ffn|mixer|fc\d_latent_proj)\."),
)
"""First match wins."""
RULES = tuple((role, re.compile(pattern)) for role, pattern in PATTERNS)

# Nemotron-H calls attention, Mamba and MLP alike `mixer`.
MAMBA_PARTS = re.compile(r"(^|\.)mixer\.(in_proj|out_proj|conv1d|dt_bias|A_log|D|norm)(\.|$)")
ATTENTION_PARTS = re.compile(r"(^|\.)mixer\.[qkvo]_proj\.")


def role_of(name: str) -> TensorRole:
    """The role behind a parameter or tensor name; the dense MLP for names that fit no rule."""
    if MAMBA_PARTS.search(name):
        return "linear_attention"
    if ATTENTION_PARTS.search(name):
        return "attention"
    return next((role for role, pattern in RULES if pattern.search(name)), "dense_mlp")
