"""The benchmark's documents: long-tailed lengths, and text with something to learn in it."""

import json
import math
import random
from pathlib import Path
from pydoc_data.topics import topics
from statistics import NormalDist

from transformers import AutoTokenizer

MEDIAN_TOKENS = 300
P99_TOKENS = 4096
SHORTEST_TOKENS = 8


def long_tailed_lengths(documents: int, *, seed: int) -> list[int]:
    """Lengths in tokens, shuffled: evenly spaced quantiles of a lognormal of this median and p99, the p99 being last.

    Quantiles instead of random draws, so that a few dozen documents have the distribution's shape and no luck in them;
    with the p99 among them, since the longest document decides what a trainer must have memory for.
    """
    normal = NormalDist()
    sigma = math.log(P99_TOKENS / MEDIAN_TOKENS) / normal.inv_cdf(0.99)
    lowest, highest = 0.5 / documents, 0.99
    quantiles = [normal.inv_cdf(lowest + (highest - lowest) * i / (documents - 1)) for i in range(documents)]
    lengths = [round(MEDIAN_TOKENS * math.exp(sigma * z)) for z in quantiles]
    lengths = [min(max(n, SHORTEST_TOKENS), P99_TOKENS) for n in lengths]
    random.Random(seed).shuffle(lengths)
    return lengths


def word_documents(lengths: list[int], *, vocabulary: list[str], end: str, seed: int) -> list[str]:
    """One text a length, of that many words, the last of them `end`.

    Words follow Zipf's law, and with probability ½ a word is the successor that its predecessor always has: a model
    can learn both, so that the loss has a course to compare.
    """
    draw = random.Random(seed)
    successor = vocabulary[:]
    draw.shuffle(successor)
    follows = dict(zip(vocabulary, successor, strict=True))
    weights = [1.0 / rank for rank in range(1, len(vocabulary) + 1)]
    texts = []
    for length in lengths:
        fresh = draw.choices(vocabulary, weights, k=length)
        words = fresh[:1]
        for word in fresh[1:]:
            words.append(follows[words[-1]] if draw.random() < 0.5 else word)
        texts.append(" ".join([*words[: length - 1], end]))
    return texts


def natural_documents(lengths: list[int], *, model: Path, seed: int) -> list[str]:
    """English of Python's own documentation, cut so that each text has about so many of the model's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    articles = list(topics.values())
    random.Random(seed).shuffle(articles)
    stream = tokenizer("\n".join(articles), add_special_tokens=False)["input_ids"]
    texts, at = [], 0
    for length in lengths:
        texts.append(tokenizer.decode(stream[at : at + length - 1]))
        at = (at + length - 1) % (len(stream) - P99_TOKENS)
    return texts


def write_texts(path: Path, texts: list[str]) -> None:
    """JSON lines of {"text": …}."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
