"""A GGUF file against the model it was made from: how far its probabilities, answers and tokens are from the reference.

Figures are in nats. KL(reference ‖ file) is over the reference's likeliest tokens, with all others as one more event.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

from gatewright.export.llama import Engine, open_engine
from gatewright.export.reference import Reference
from gatewright.spec.errors import ModelError

EXACT_KL = 5e-5
"""Median KL that a file in f16 or f32 stays below. Right conversions measure 1.5e-5 at most, wrong ones 4e-4."""
WORSE = 2.0
"""A quantised model's KL over that of the base model in the same type, at most."""
SMALL_MEAN_KL = 1e-3
"""Below this, or a median below EXACT_KL, a quantised file passes whatever its base has: both are next to nothing."""
HARD_GAP = 0.05
"""Two likeliest tokens disagree hard when the reference gives one that much more than the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One file on one machine."""

    file_bytes: int
    tokens: int
    """Positions compared: those of the documents, without beginnings that an earlier one had."""
    kl_mean: float
    kl_mean_error: float
    """Standard error of the mean, with documents as what is drawn."""
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float
    """Share of positions with the reference's likeliest token."""
    hard_disagreement: float
    """Share of positions where the likeliest token is another one, and the reference is clear about it."""
    perplexity: float
    reference_perplexity: float
    same_answers: int
    answers: int
    texts_alike: int
    """Hard texts that become the same tokens."""
    texts: int
    read_tokens_per_s: float
    write_tokens_per_s: float
    load_s: float
    memory_bytes: int
    other_texts: list[str] = field(default_factory=list)
    """Texts that become other tokens."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Gate:
    """One thing a file must do."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "limit": self.limit, "passed": self.passed}

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.3g}, wanted at most {self.limit:.3g}"


def measure(
    file: Path,
    reference: Reference,
    *,
    threads: int | None = None,
    adapter: Path | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Figures:
    """Loads the file in llama.cpp and compares. `tick(done, total)` is told of documents and answers.

    Raises ModelError for a file that does not load, or has another vocabulary than the reference.
    """
    with open_engine(file, context_tokens=reference.context_tokens, threads=threads, adapter=adapter) as engine:
        if engine.vocab_size != reference.vocab_size:
            raise ModelError(
                f"{file}: has {engine.vocab_size:,} tokens, the reference {reference.vocab_size:,}; it is another model"
            )
        total = len(reference.documents) + len(reference.prompts)
        others = [
            text
            for text, tokens in zip(reference.texts, reference.text_tokens, strict=True)
            if engine.tokenize(text) != tokens
        ]
        seen, by_document, read_s = _read_documents(engine, reference, lambda done: tick(done, total))
        same, written, write_s = 0, 0, 0.0
        for index, (prompt, wanted) in enumerate(zip(reference.prompts, reference.answers, strict=True), start=1):
            started = time.perf_counter()
            answer = engine.greedy(prompt, tokens=reference.answer_tokens, ends=reference.ends)
            write_s += time.perf_counter() - started
            written += len(answer) + 1
            same += answer == wanted
            tick(len(reference.documents) + index, total)
        kl = np.concatenate(by_document)
        return Figures(
            file_bytes=file.stat().st_size + (adapter.stat().st_size if adapter else 0),
            tokens=len(kl),
            kl_mean=float(kl.mean()),
            kl_mean_error=_error_of_mean(by_document),
            kl_median=float(np.median(kl)),
            kl_p99=float(np.quantile(kl, 0.99)),
            kl_max=float(kl.max()),
            top1=float(seen["same"].mean()),
            hard_disagreement=float(seen["hard"].mean()),
            perplexity=math.exp(-float(np.nanmean(seen["next"]))),
            reference_perplexity=math.exp(-float(np.nanmean(reference.next_logprobs_N))),
            same_answers=same,
            answers=len(reference.prompts),
            texts_alike=len(reference.texts) - len(others),
            texts=len(reference.texts),
            read_tokens_per_s=reference.tokens / read_s,
            write_tokens_per_s=written / write_s if write_s else 0.0,
            load_s=engine.load_s,
            memory_bytes=engine.memory_bytes,
            other_texts=others,
        )


def gates(figures: Figures, *, exact: bool, base: Figures | None) -> list[Gate]:
    """What a file must do: an `exact` one (f16 or f32) be the model, any other lose no more than its base.

    A mean may be twice its base's and two standard errors more, so that few documents do not fail a sound file.
    The largest value is never judged: where two experts tie in the router, rounding decides between them, and a few
    tokens of a sound file are far off. Nor is the 99th percentile: docs/export.md says why.
    """
    # Where a tokenizer composes accents (NFC) first, llama.cpp does not: known of it, and told, but no fault of a file.
    others = sum(normalize("NFC", text) == text for text in figures.other_texts)
    found = [Gate("texts that become other tokens", others, 0)]
    if exact:
        found.append(Gate("median KL", figures.kl_median, EXACT_KL))
    elif base is not None:
        doubt = 2 * math.hypot(figures.kl_mean_error, WORSE * base.kl_mean_error)
        limits = {
            "median KL": (figures.kl_median, base.kl_median, max(WORSE * base.kl_median, EXACT_KL)),
            "mean KL": (figures.kl_mean, base.kl_mean, max(WORSE * base.kl_mean + doubt, SMALL_MEAN_KL)),
        }
        found += [Gate(f"{name} (base {floor:.3g})", value, limit) for name, (value, floor, limit) in limits.items()]
    return found


def _read_documents(
    engine: Engine, reference: Reference, tick: Callable[[int], None]
) -> tuple[dict[str, npt.NDArray[np.float64]], list[npt.NDArray[np.float64]], float]:
    """Figures of every position, the KL by document, and the seconds that reading took."""
    parts: dict[str, list[npt.NDArray[np.float64]]] = {"kl": [], "same": [], "hard": [], "next": []}
    contexts: set[bytes] = set()
    at, read_s = 0, 0.0
    for count, document in enumerate(reference.documents, start=1):
        started = time.perf_counter()
        logits_TV = engine.logits(document)
        read_s += time.perf_counter() - started
        here = slice(at, at + len(document))
        found = _compare(
            logits_TV.astype(np.float64),
            reference.top_ids_NK[here],
            reference.top_logprobs_NK[here].astype(np.float64),
            np.array(document),
        )
        new_T = _first_seen(document, contexts)
        for name, values in found.items():
            parts[name].append(values if name == "next" else values[new_T])
        at += len(document)
        tick(count)
    return {name: np.concatenate(values) for name, values in parts.items()}, parts["kl"], read_s


def _error_of_mean(by_document: list[npt.NDArray[np.float64]]) -> float:
    """Of a mean over positions that come in documents: the spread of each document's sum about its expected one."""
    positions = sum(map(len, by_document))
    mean = sum(float(kl.sum()) for kl in by_document) / positions
    return math.sqrt(sum((float(kl.sum()) - mean * len(kl)) ** 2 for kl in by_document)) / positions


def _first_seen(document: list[int], contexts: set[bytes]) -> npt.NDArray[np.bool_]:
    """Which positions have a context that no earlier document began with; the others' figures would count again.

    Chats begin alike: without this, one odd token of the template is a hundredth of all positions.
    """
    tokens = np.array(document, dtype=np.int32).tobytes()
    begun = [tokens[: 4 * end] for end in range(1, len(document) + 1)]
    new_T = np.array([context not in contexts for context in begun])
    contexts.update(begun)
    return new_T


def _compare(
    logits_TV: npt.NDArray[np.float64],
    ids_TK: npt.NDArray[np.int32],
    p_TK: npt.NDArray[np.float64],
    document_T: npt.NDArray[np.int64],
) -> dict[str, npt.NDArray[np.float64]]:
    """KL, same likeliest token, hard disagreement, and the file's log-probability of the token that follows."""
    top_T = logits_TV.argmax(axis=1)
    peak_T1 = logits_TV.max(axis=1, keepdims=True)
    q_TV = logits_TV - peak_T1 - np.log(np.exp(logits_TV - peak_T1).sum(axis=1, keepdims=True))
    q_TK = np.take_along_axis(q_TV, ids_TK, axis=1)
    kl_T = (np.exp(p_TK) * (p_TK - q_TK)).sum(axis=1)
    if ids_TK.shape[1] < logits_TV.shape[1]:
        rest_p_T = np.maximum(1 - np.exp(p_TK).sum(axis=1), 1e-12)
        rest_q_T = np.maximum(1 - np.exp(q_TK).sum(axis=1), 1e-12)
        kl_T += rest_p_T * np.log(rest_p_T / rest_q_T)
    same_T = top_T == ids_TK[:, 0]
    # What the reference gives the file's choice: at most its last kept probability where that is not among the kept.
    chosen_T = np.where(ids_TK == top_T[:, None], np.exp(p_TK), 0.0).max(axis=1)
    hard_T = ~same_T & (np.exp(p_TK[:, 0]) - chosen_T > HARD_GAP)
    next_T = np.full(len(document_T), np.nan)
    next_T[:-1] = q_TV[np.arange(len(document_T) - 1), document_T[1:]]
    return {"kl": kl_T, "same": same_T.astype(float), "hard": hard_T.astype(float), "next": next_T}
