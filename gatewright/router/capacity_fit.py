"""How the variance of expert shares falls with the length of a run, measured on short runs and carried on to long ones.

V(L) = τ² + a L^−β: what differs between documents stays for ever, what varies within one averages out, though far more
slowly than the 1/L of independent tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]

BETAS = np.linspace(0.1, 1.0, 46)
LENGTH_DOCUMENTS = 10
"""Documents that must reach a length for its variance to count."""


class SharesByLength:
    """Mean and mean square of each document's shares, over runs of 1, 2, 4 … blocks that do not overlap."""

    def __init__(self, documents: Sequence[Ints]) -> None:
        """documents: counts [blocks, G] each."""
        longest = max(len(counts) for counts in documents)
        self.lengths_M = 2.0 ** np.arange(longest.bit_length())
        shape = (len(documents), len(self.lengths_M), documents[0].shape[1])
        self.mean_DMG, self.square_DMG = np.zeros(shape), np.zeros(shape)
        self.reaches_DM = np.zeros(shape[:2], bool)
        for d, counts in enumerate(documents):
            for m, length in enumerate(self.lengths_M.astype(int)):
                if len(counts) >= length:
                    shares = _shares(counts, length)
                    self.mean_DMG[d, m], self.square_DMG[d, m] = shares.mean(axis=0), (shares**2).mean(axis=0)
                    self.reaches_DM[d, m] = True

    def variances(self, chosen: Ints) -> tuple[Floats, Floats]:
        """Lengths [M] in blocks and the variance [M] of a run's shares, summed over groups, in these documents.

        Every document counts alike; lengths that fewer than LENGTH_DOCUMENTS reach are left out.
        """
        reaches_DM = self.reaches_DM[chosen]
        documents_M = reaches_DM.sum(axis=0)
        known = documents_M >= LENGTH_DOCUMENTS
        count_M1 = documents_M[known, None]
        mean_MG = self.mean_DMG[chosen][:, known].sum(axis=0) / count_M1
        square_MG = self.square_DMG[chosen][:, known].sum(axis=0) / count_M1
        spread_MG = (square_MG - mean_MG**2) * (count_M1 / (count_M1 - 1))
        return self.lengths_M[known], spread_MG.sum(axis=1)


@dataclass(frozen=True, slots=True)
class FittedVariance:
    """V(L) = τ² + a L^−β."""

    tau2: float
    a: float
    beta: float

    def __call__(self, length: float) -> float:
        return self.tau2 + self.a * float(length**-self.beta)


def fit_variance(lengths_M: Floats, variances_M: Floats) -> FittedVariance:
    """The best fit in relative squares with τ², a ≥ 0, over a grid of β; a constant where there is no variance."""
    best, best_error = FittedVariance(float(variances_M[-1]), 0.0, 1.0), math.inf
    if (variances_M <= 0).any():
        return best
    for beta in BETAS:
        columns_M2 = np.stack([np.ones_like(lengths_M), lengths_M**-beta], axis=1) / variances_M[:, None]
        for free in ([0, 1], [0], [1]):
            coefficients = np.zeros(2)
            coefficients[free] = np.linalg.lstsq(columns_M2[:, free], np.ones(len(lengths_M)), rcond=None)[0]
            error = float(((columns_M2 @ coefficients - 1.0) ** 2).sum())
            if (coefficients >= 0).all() and error < best_error:
                best, best_error = FittedVariance(float(coefficients[0]), float(coefficients[1]), float(beta)), error
    return best


def _shares(counts_BG: Ints, length: int) -> Floats:
    """[runs, G] shares of consecutive runs of `length` blocks."""
    runs = len(counts_BG) // length
    summed = counts_BG[: runs * length].reshape(runs, length, -1).sum(axis=1)
    shares: Floats = summed / summed.sum(axis=1, keepdims=True)
    return shares
