"""The part of RouterHealth that follows from counts: how even the load is, and which experts are dying.

L MoE layers, E experts, S documents; a count is a number of assignments (tokens × top_k in all).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gatewright.router.load import load_ratios

STARVED = 0.1
"""Part of the fair share below which an expert is said to starve."""
LEAST_EVIDENCE = 10.0
"""Independent assignments that a fair expert must expect before its silence means death: one misses all with e⁻¹⁰."""
LEAST_INFLATION = 5.7
"""Variance inflation where none was measured: the smallest we saw (128-token documents; 168 at 8,192 tokens)."""

Counts = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountHealth:
    """The fields of spec.event.RouterHealth that follow from counts; one value a layer each."""

    load_cv: list[float]
    max_violation: list[float]
    effective_experts: list[float]
    dead: list[int]
    starved: list[int]


def count_health(counts_by_layer: Sequence[Sequence[int]]) -> CountHealth:
    """Balance of each layer from its [E] assignments. A layer without any has CV 0 and E dead experts."""
    loads = [load_ratios(counts) for counts in counts_by_layer]
    return CountHealth(
        load_cv=[_variation(load) for load in loads],
        max_violation=[max(load) - 1.0 for load in loads],
        effective_experts=[_effective(load) for load in loads],
        dead=[sum(count == 0 for count in counts) for counts in counts_by_layer],
        starved=[sum(ratio < STARVED for ratio in load) for load in loads],
    )


def _variation(load: Sequence[float]) -> float:
    mean = math.fsum(load) / len(load)
    if mean == 0:
        return 0.0
    return math.sqrt(math.fsum((ratio - mean) ** 2 for ratio in load) / len(load)) / mean


def _effective(load: Sequence[float]) -> float:
    """exp(entropy of the shares) / E, in (0, 1]; 0 without any load."""
    experts = len(load)
    shares = [ratio / experts for ratio in load if ratio > 0]
    if not shares:
        return 0.0
    return math.exp(-math.fsum(share * math.log(share) for share in shares)) / experts


def variance_inflation(counts_SE: Counts) -> float | None:
    """Variance of a document's expert shares over that of independent tokens; None for fewer than two documents.

    Pearson's X² over its degrees of freedom, Σ (c - n q)² / (n q) / ((S - 1)(E - 1)), the usual estimate of
    overdispersion (McCullagh and Nelder, Generalized Linear Models, §4.5). At least 1. Experts that got nothing say
    nothing and are left out.
    """
    counts = np.asarray(counts_SE, dtype=float)
    counts = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
    if counts.shape[0] < 2 or counts.shape[1] < 2:
        return None
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return max(1.0, chi2 / float((counts.shape[0] - 1) * (counts.shape[1] - 1)))


def evidence(tokens: int, *, top_k: int, experts: int, inflation: float) -> float:
    """Independent assignments that `tokens` tokens promise an expert with the fair share."""
    return tokens * top_k / experts / inflation


def evidence_tokens(*, top_k: int, experts: int, inflation: float) -> int:
    """Tokens from which on an expert without any may be called dead."""
    return math.ceil(LEAST_EVIDENCE * inflation * experts / top_k)
