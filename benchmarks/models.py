"""The benchmark's model: a small Qwen3-MoE with the proportions of Qwen3-30B-A3B, made on the spot, and its FLOPs."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gatewright.model.adapter_files import save_adapter
from gatewright.model.adapters import add_adapters
from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.spec import run

END, PAD = "<end>", "<pad>"
VOCABULARY = 4096


def tiny_moe_config(*, hidden: int = 256, layers: int = 8, experts: int = 32, top_k: int = 4) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's proportions: attention twice as wide as hidden, active experts three times, grouped KV heads."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2 * hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=3 * hidden,
        moe_intermediate_size=3 * hidden // top_k,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def words() -> list[str]:
    """The vocabulary's ordinary words, one token each."""
    return [f"w{i}" for i in range(VOCABULARY - 2)]


def make_tiny_moe(folder: Path, *, seed: int = 0) -> None:
    """Writes a model with random weights (float32) and a tokenizer of whole words into `folder`."""
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(tiny_moe_config()).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate([PAD, END, *words()])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(PAD, special=True), AddedToken(END, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD, unk_token=PAD).save_pretrained(
        folder
    )


@dataclass(frozen=True)
class Work:
    """Floating-point operations a model does for documents, forward and backward, with its base weights frozen."""

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention


def useful_flops(folder: Path, lengths: list[int], *, rank: int) -> Work:
    """What training LoRA of `rank` on attention and experts needs at least: no padding, no recomputing, no dense dW.

    Linear: 2 per weight and token forward and 2 backward (the gradient of the input) for each frozen weight a token
    meets (attention, router, its top-k experts, head); 2 + 4 for the adapters' weights. Attention: 4·(n²/2)·N·D forward
    for scores and values under a causal mask, 2.5 times that backward, for each document of n tokens.
    """
    config = AutoConfig.from_pretrained(folder)
    hidden, layers, top_k = config.hidden_size, config.num_hidden_layers, config.num_experts_per_tok
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    experts = config.to_dict().get("num_experts") or config.to_dict()["num_local_experts"]
    width = config.to_dict().get("moe_intermediate_size") or config.intermediate_size
    frozen = layers * (hidden * (2 * q + 2 * kv) + hidden * experts + top_k * 3 * hidden * width)
    frozen += hidden * config.vocab_size
    pairs = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    pairs += [(hidden, 2 * width), (width, hidden)] * top_k
    adapter = layers * sum(rank * (i + o) for i, o in pairs)
    tokens = sum(lengths)
    return Work(
        linear=tokens * (4.0 * frozen + 6.0 * adapter),
        attention=layers * sum(3.5 * 4.0 * (n * n / 2) * q for n in lengths),
    )


def first_adapter(model: Path, folder: Path, *, dtype: str, rank: int, alpha: float, seed: int) -> None:
    """Writes the adapter that `gatewright train` begins with for this seed, in PEFT's format."""
    device = torch.device("cpu")
    kernel = choose_kernel(device, getattr(torch, dtype))
    loaded = load_model(run.Model(path=str(model), dtype=dtype), device=device, kernel=kernel)
    adapter = run.Adapter(rank=rank, alpha=alpha)
    add_adapters(loaded, adapter, seed=seed)
    save_adapter(loaded, adapter, folder, base=str(model))
