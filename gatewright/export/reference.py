"""What the original model answers, in a small file: its likeliest tokens, answers and tokenization of hard texts.

The file is numpy's .npz without pickles, so a machine that has only numpy and llama.cpp can judge a model by it.
Shapes: N tokens of all documents, K likeliest tokens kept, P prompts.
"""

import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gatewright.spec.errors import ModelError

VERSION = 1
ARRAYS = {"top_ids_NK": "top_ids", "top_logprobs_NK": "top_logprobs", "next_logprobs_N": "next_logprobs"}
FACTS = ("model", "vocab_size", "answer_tokens", "ends", "texts", "expert_tokens")
LISTS = ("documents", "prompts", "answers", "text_tokens")
KEPT = 1024
"""Likeliest tokens kept at each position; the others count as one. Dividing by less would only lower the KL."""
HARD_TEXTS = (
    "Hello world", " leading", "trailing  ", "a\tb\n\nc\r\nd", "   \n  \t\n", "I'm they'll WE'RE it's D'accord",
    "1 12 123 1234 12345 3.14159 1,000,000 0x7f", "naïve café Ångström ﬁ ß ẞ", "漢字かな交じり文、日本語。",
    "한국어 문장입니다",
    "Привет, мир! Ещё раз.", "مرحبا بالعالم", "नमस्ते दुनिया", "😀👩‍👩‍👧‍👦🏳️‍🌈 🇫🇮", "e\u0301 vs é \u200b zero width",
    "def f(x):\n    return x**2  # sq\n\n\tpass", '{"a": [1, 2, {"b": null}]}', "$x^2 + \\frac{1}{2}$ <br/> &amp;",
    "!!!???...---===", "http://example.com/a?b=c&d=%20e", "CamelCaseAndsnake_case-kebab", "\u00a0nbsp\u3000wide",
    "x" * 40, "ab " * 12, "\n" * 5 + "end", "“quotes” ‘single’ — dash…", "ＡＢＣ１２３", "a\u0000b", "ﷺ ㍿ ½ ²",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Answers of one model on held-out documents."""

    model: str
    vocab_size: int
    documents: list[list[int]]
    top_ids_NK: npt.NDArray[np.int32]
    """The likeliest next tokens at each position, best first."""
    top_logprobs_NK: npt.NDArray[np.float32]
    next_logprobs_N: npt.NDArray[np.float32]
    """Log-probability of the token that does follow; NaN at the last position of a document."""
    prompts: list[list[int]]
    answers: list[list[int]]
    """Greedy answers to the prompts, without the end token."""
    answer_tokens: int
    """Longest answer that was asked for."""
    ends: list[int]
    """Tokens that end an answer."""
    texts: list[str]
    text_tokens: list[list[int]]
    expert_tokens: dict[str, list[int]]
    """Layer -> assignments each expert got on the documents; empty for a dense model."""

    @property
    def tokens(self) -> int:
        return sum(len(document) for document in self.documents)

    @property
    def context_tokens(self) -> int:
        """A context that holds every document, and every prompt with its answer."""
        longest = max(len(document) for document in self.documents)
        return max(longest, max((len(p) for p in self.prompts), default=0) + self.answer_tokens) + 1


def save_reference(reference: Reference, file: Path) -> None:
    """Writes the file whole, or not at all."""
    facts = {name: getattr(reference, name) for name in FACTS}
    arrays: dict[str, Any] = {
        "facts": np.frombuffer(json.dumps({"version": VERSION, **facts}).encode(), dtype=np.uint8),
    }
    arrays |= {key: getattr(reference, name) for name, key in ARRAYS.items()}
    for name in LISTS:
        arrays |= _flat(name, getattr(reference, name))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(buffer.getbuffer())
    os.replace(partial, file)


def load_reference(file: Path) -> Reference:
    """Raises ModelError for a file that is missing, damaged or of another version."""
    try:
        with np.load(file, allow_pickle=False) as data:
            facts = json.loads(data["facts"].tobytes())
            if facts.pop("version") != VERSION:
                raise ModelError(f"{file}: written by another version of gatewright; export again")
            lists: dict[str, Any] = {name: _lists(data, name) for name in LISTS}
            arrays: dict[str, Any] = {name: data[key] for name, key in ARRAYS.items()}
            return Reference(**arrays, **lists, **facts)
    except FileNotFoundError:
        raise ModelError(f"{file}: not there; give the folder that `gatewright export` wrote") from None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file}: damaged ({error}); copy it again") from None


def _flat(name: str, lists: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[np.int32]]:
    return {
        f"{name}_flat": np.array([number for part in lists for number in part], dtype=np.int32),
        f"{name}_sizes": np.array([len(part) for part in lists], dtype=np.int32),
    }


def _lists(data: "np.lib.npyio.NpzFile", name: str) -> list[list[int]]:
    ends = np.cumsum(data[f"{name}_sizes"])
    return [part.tolist() for part in np.split(data[f"{name}_flat"], ends[:-1])] if len(ends) else []
