"""Lengths of documents for the packing and scheduling benchmarks: distributions as generators, and files.

None is a real data set. Parameters follow what is published of such data: medians of some hundred tokens, a tail of
log-normal or power-law kind, mixtures of short and long.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

Draw = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(median: float, sigma: float) -> Draw:
    return lambda rng, n: rng.lognormal(np.log(median), sigma, n)


def with_long(short: Draw, share: float, low: float, high: float) -> Draw:
    """A share of the documents log-uniform between two lengths."""

    def drawn(rng: np.random.Generator, n: int) -> np.ndarray:
        long = np.exp(rng.uniform(np.log(low), np.log(high), n))
        return np.where(rng.random(n) < share, long, short(rng, n))

    return drawn


def bimodal(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.12, rng.normal(20_000, 5_000, n), rng.normal(900, 350, n))


def power_law(rng: np.random.Generator, n: int) -> np.ndarray:
    return 16 + 350 * rng.pareto(1.25, n)


DISTRIBUTIONS: dict[str, Draw] = {
    "chat": with_long(lognormal(280, 1.0), 0.004, 4_000, 200_000),
    "articles": lognormal(350, 1.35),
    "web": lognormal(600, 1.5),
    "instructions": lognormal(900, 1.1),
    "long mix": with_long(lognormal(700, 1.1), 0.08, 8_000, 64_000),
    "code": with_long(lognormal(450, 1.4), 0.03, 16_000, 128_000),
    "bimodal": bimodal,
    "power law": power_law,
}


def draw(name: str, documents: int, seed: int) -> np.ndarray:
    """[documents] whole tokens, at least 16 each, without an upper end."""
    drawn = DISTRIBUTIONS[name](np.random.default_rng([seed, len(name)]), documents)
    return np.clip(drawn, 16, 10_000_000).astype(np.int64)


def read_lengths(path: Path) -> np.ndarray:
    """One length a line; empty lines and lengths of 0 are left out."""
    lengths = np.array([int(line) for line in path.read_text().split()], dtype=np.int64)
    return lengths[lengths > 0]
