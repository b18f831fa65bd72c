"""A tokenizer as GGUF's fields: tokens and their kinds, merges, special tokens, chat template, and the pre-tokenizer.

llama.cpp has its pre-tokenizers in code, by name. The name is found by what tokenizer.json says it does, so that a
tokenizer trained last night is known as well as a published one.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerFast

from gatewright.data.tokenizer import load_tokenizer
from gatewright.spec.errors import ModelError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    ("ByteLevel",): "gpt-2",
    (f"Split {_GPT2}", "bytes"): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (rf"Split {_WORDS}\p{{N}}{_REST}", "bytes"): "qwen2",
    (rf"Split {_WORDS}\p{{N}}{{1,3}}{_REST}", "bytes"): "llama-bpe",
}
"""What tokenizer.json does to a text before merges, step by step, and llama.cpp's name of it."""
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
NO_SCORE = -1000.0
"""Of a token that no merge makes; others have their merge's rank, negative: llama.cpp merges the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer."""

    model: str
    """gpt2: byte-level BPE; llama: SentencePiece-like BPE with byte fallback."""
    pre: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    merges: list[str]
    special: Mapping[str, int]
    """bos, eos, pad, unk."""
    adds_bos: bool
    adds_eos: bool
    space_prefix: bool
    chat_template: str | None

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.kinds)
        if self.merges:
            writer.add_token_merges(self.merges)
        add = {
            "bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id,
            "pad": writer.add_pad_token_id, "unk": writer.add_unk_token_id,
        }  # fmt: skip
        for name, number in self.special.items():
            add[name](number)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.model == "llama":
            writer.add_add_space_prefix(self.space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(folder: Path, *, size: int, chat_template: str | None = None) -> Vocabulary:
    """The tokenizer of a model folder, padded to the `size` of the embedding.

    Raises ModelError for a tokenizer that llama.cpp does not have, or that has more tokens than the model.
    """
    tokenizer = load_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    if model["type"] != "BPE":
        raise ModelError(f"{folder}: a tokenizer of kind {model['type']}; only BPE tokenizers are converted")
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(known) >= size:
        raise ModelError(
            f"{folder}: the tokenizer has a token number {max(known):,}, the model only {size:,} rows of embedding; "
            "these files do not belong together"
        )
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    pieces = bool(model.get("byte_fallback"))
    tokens, kinds = _tokens(tokenizer, known, size, pieces=pieces)
    ids = tokenizer("a", add_special_tokens=True).input_ids
    special = {
        "bos": tokenizer.bos_token_id, "eos": _end(folder, tokenizer, size),
        "pad": tokenizer.pad_token_id, "unk": tokenizer.unk_token_id if _states_unknown(folder, model) else None,
    }  # fmt: skip
    return Vocabulary(
        model="llama" if pieces else "gpt2",
        pre="default" if pieces else _pre_tokenizer(folder, content),
        tokens=tokens,
        kinds=kinds,
        scores=_scores(tokens, merges) if pieces else None,
        merges=[] if pieces else [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges],
        special={name: number for name, number in special.items() if number is not None},
        adds_bos=tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        adds_eos=len(ids) > 1 and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id,
        space_prefix=_space_prefix(content),
        chat_template=chat_template or (tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None),
    )


def known_pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name of what the folder's tokenizer does before merges; None where it has none, or needs none."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return PRE_TOKENIZERS.get(_steps(content))


def _end(folder: Path, tokenizer: PreTrainedTokenizerFast, size: int) -> int | None:
    """The token that ends an answer: the tokenizer's own, unless the model's generation_config names others only."""
    file = folder / "generation_config.json"
    ends: Any = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ends = [ends] if isinstance(ends, int) else ends or []
    own = tokenizer.eos_token_id
    known = [end for end in ends if end < size]
    return own if own in known or not known else int(known[0])


def _states_unknown(folder: Path, model: Mapping[str, Any]) -> bool:
    """Whether the files name an unknown token: some of transformers' tokenizer classes make one up."""
    file = folder / "tokenizer_config.json"
    config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return bool(model.get("unk_token") or config.get("unk_token"))


def _tokens(
    tokenizer: PreTrainedTokenizerFast, known: Mapping[int, str], size: int, *, pieces: bool
) -> tuple[list[str], list[int]]:
    added = tokenizer.added_tokens_decoder
    tokens: list[str] = []
    kinds: list[int] = []
    for number in range(size):
        token = known.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            kinds.append(TokenType.UNUSED)
        elif number in added:
            special = added[number].special or _looks_special(token)
            unknown = pieces and number == tokenizer.unk_token_id
            kinds.append(
                TokenType.UNKNOWN if unknown else TokenType.CONTROL if special else TokenType.USER_DEFINED
            )  # fmt: skip
            tokens.append(token if special else token.replace("▁", " "))
        else:
            tokens.append(token)
            kinds.append(TokenType.BYTE if pieces and BYTE.fullmatch(token) else TokenType.NORMAL)
    return tokens, kinds


def _looks_special(token: str) -> bool:
    """As llama.cpp has it: some published tokenizers do not mark their control tokens."""
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or (
        token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>"))
    )


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Minus the rank of the first merge that makes the token."""
    rank: dict[str, int] = {}
    for index, pair in enumerate(merges):
        rank.setdefault("".join(pair), index)
    return [-float(rank[token]) if token in rank else NO_SCORE - len(merges) for token in tokens]


def _space_prefix(content: Mapping[str, Any]) -> bool:
    """Whether a text gets a space put before it, in either of the two ways that tokenizer.json has for that."""
    normalizer, before = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    prepends = any(step.get("type") == "Prepend" for step in steps)
    return prepends or (before.get("type") == "Metaspace" and before.get("prepend_scheme") != "never")


def _pre_tokenizer(folder: Path, content: Mapping[str, Any]) -> str:
    steps = _steps(content)
    if steps in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[steps]
    raise ModelError(
        f"{folder}/tokenizer.json: llama.cpp has no pre-tokenizer that does what this one does ({', '.join(steps)}), "
        "so texts would be cut into other tokens than in training; no GGUF file is written"
    )


def _steps(content: Mapping[str, Any]) -> tuple[str, ...]:
    stated = content.get("pre_tokenizer") or {}
    return tuple(_step(part) for part in stated.get("pretokenizers", [stated]))


def _step(part: Mapping[str, Any]) -> str:
    kind = str(part.get("type"))
    if kind == "Split":
        return f"Split {part['pattern'].get('Regex')}" if part.get("behavior") == "Isolated" else f"Split? {part}"
    if kind == "ByteLevel":
        plain = not part.get("add_prefix_space")
        return ("ByteLevel" if part.get("use_regex", True) else "bytes") if plain else "ByteLevel with a space before"
    if kind == "Digits":
        return "Digits" if part.get("individual_digits") else "Digits in groups"
    return kind
