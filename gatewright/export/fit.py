"""How much memory a GGUF file takes when it runs: its weights, the keys and values of the context, and work space."""

import json
from pathlib import Path

UBATCH_TOKENS = 512
"""Tokens that llama.cpp works on at one time by default."""


def running_bytes(model: Path, file_bytes: int, *, context_tokens: int) -> int | None:
    """Bytes for one sequence of that context, keys and values in 16 bits; None for attention of another kind.

    The work space is the logits of the last token and four activations as wide as the widest layer, for 512 tokens.
    """
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    values = values.get("text_config") or values
    if values.get("kv_lora_rank") or "num_attention_heads" not in values or "layer_types" in values:
        kinds = set(values.get("layer_types") or ["other"])
        if kinds != {"full_attention"}:
            return None
    heads = values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    kv_heads = values.get("num_key_value_heads") or heads
    kv_bytes = 2 * values["num_hidden_layers"] * kv_heads * head_dim * context_tokens * 2
    wide = max(values["hidden_size"], values.get("intermediate_size") or 0, heads * head_dim)
    scores_bytes = heads * context_tokens * UBATCH_TOKENS * 4
    return int(file_bytes + kv_bytes + 4 * wide * UBATCH_TOKENS * 4 + values["vocab_size"] * 4 + scores_bytes)
