"""Tiny models of the converted architectures with a trained tokenizer, their adapters, and data to judge them by."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tiny import CHATML, load_plain
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **ROUTED, shared_expert_intermediate_size=256, norm_topk_prob=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **ROUTED, norm_topk_prob=True, head_dim=64),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(
        **SIZES | {"num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False
    ),
}
ADAPTED = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EXPERTS_TOO = ADAPTED | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GLM_SPECIALS = ["[gMASK]", "<|user|>", "<|observation|>"]
"""Tokens that llama.cpp's converter asks of GLM's tokenizers."""


def save_base(kind: str, folder: Path, *, seed: int = 0, vocabulary: bool = True) -> Path:
    """A random model of that kind and its tokenizer."""
    save_random(CONFIGS[kind], folder, seed=seed)
    if vocabulary:
        save_tokenizer(folder, tokenizer_of(kind))
    return folder


def save_random(config: PretrainedConfig, folder: Path, *, seed: int = 0) -> None:
    """A random model with routers and norms that matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.8, 1.2)
            else:
                parameter.normal_(std=0.3 if name.endswith("gate.weight") else 0.06)
    model.save_pretrained(folder)


def tokenizer_of(kind: str) -> str:
    """Which of the published tokenizers a model's is cut like."""
    return "qwen2" if kind.startswith("qwen") else "smollm"


def save_tokenizer(folder: Path, kind: str, *, specials: Sequence[str] = ()) -> None:
    """A BPE tokenizer with merges, cut as that published tokenizer cuts, with a ChatML template."""
    if kind == "pieces":
        raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet, first = [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        raw = Tokenizer(models.BPE())
        cuts = {
            "qwen2": [
                pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ],
            "smollm": [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ],
            "unknown": [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        }[kind]
        raw.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        raw.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=[*first, *SPECIALS, *specials],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator([json.dumps(row, ensure_ascii=False) for row in rows(300)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    extra = [AddedToken(token, special=True) for token in (SPECIALS[1], *specials)]
    fast.add_special_tokens({"additional_special_tokens": extra})
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def rows(count: int, *, seed: int = 0) -> list[dict[str, object]]:
    """Chat rows with some of everything that tokenizers find hard."""
    draw = random.Random(seed)
    words = ["please", "add", "the", "numbers", "café", "漢字", "it's", "", "12", "345", "x=y\n\treturn", "世界"]
    words += ["Привет", "—", "“so”", ":-)"]
    found = []
    for _ in range(count):
        question = " ".join(draw.choice(words) for _ in range(draw.randrange(4, 12)))
        answer = " ".join(draw.choice(words) for _ in range(draw.randrange(3, 6)))
        found.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return found


def save_rows(file: Path, count: int, *, seed: int = 0) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(count, seed=seed))
    file.write_text(text, encoding="utf-8")
    return file


def save_adapter(base: Path, folder: Path, *, size: float = 0.05, **settings: object) -> PreTrainedModel:
    """A PEFT adapter with random factors; returns the adapted model."""
    torch.manual_seed(1)
    model = get_peft_model(load_plain(base), LoraConfig(r=4, lora_alpha=8, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=size)
    model.save_pretrained(folder)
    return model.eval()
