"""Small tokenizers made on the spot: byte-level BPE with the special tokens that a chat template needs."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. user assistant system tool: two plus two is four, and three times three is nine.",
] * 3


def make_tokenizer(
    *,
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    added: tuple[str, ...] = (),
    eos: str | None = "<|im_end|>",
    bos: str | None = None,
    template: str | None = None,
    folder: Path | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer of some 400 tokens with `special` tokens and other whole `added` ones; saved to `folder` if given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    known = dict.fromkeys(token for token in (*special, bos, eos) if token)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    if folder:
        fast.save_pretrained(folder)
        fast = PreTrainedTokenizerFast.from_pretrained(folder)
    return fast
