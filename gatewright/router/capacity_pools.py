"""Capacity pools of one layer: runs of consecutive blocks as they stand in documents, drawn together as ranks would.

D documents, N runs in them, R pools, G groups that have a capacity each; a load is a share times G.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gatewright.router.capacity_fit import SharesByLength, fit_variance
from gatewright.router.drop import mean_drop, smallest_factor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]

DRAWS = 1000
"""Pools drawn for one estimate."""


class LayerPools:
    """A layer's runs of consecutive blocks; every document, and every run in it, is as likely as another.

    N runs in D documents, R pools drawn.
    """

    def __init__(self, documents: Sequence[Ints], blocks: int, pool: int) -> None:
        """documents: counts [blocks, G] each. Where one is shorter than `blocks`, the longest runs of all serve."""
        self.pool = pool
        self.wanted = blocks
        self.seen = min(blocks, min(len(counts) for counts in documents))
        runs = [_runs(counts, self.seen) for counts in documents]
        self.loads_NG = np.concatenate(runs)
        self.mean_DG = np.stack([run.mean(axis=0) for run in runs])
        self.sizes_D = np.array([len(run) for run in runs])
        self.starts_D = np.cumsum(self.sizes_D) - self.sizes_D
        self.by_length = SharesByLength(documents) if self.seen < blocks else None

    @property
    def mean_G(self) -> Floats:
        mean: Floats = self.mean_DG.mean(axis=0)
        return mean

    @property
    def documents(self) -> int:
        return len(self.sizes_D)

    def factor(self, draw: np.random.Generator, *, drop: float) -> float:
        """Smallest factor whose expected drop is no more than `drop`."""
        loads_RG, weights_R = self._pools(draw)
        return smallest_factor(loads_RG, drop=drop, weights_R=weights_R)

    def drop(self, draw: np.random.Generator, *, factor: float) -> float:
        """Expected drop with this factor."""
        loads_RG, weights_R = self._pools(draw)
        return mean_drop(loads_RG, factor, weights_R=weights_R)

    def resampled_factor(self, draw: np.random.Generator, chosen: Ints, *, drop: float) -> float:
        """The factor if the documents were those with the numbers `chosen`, some of them perhaps twice."""
        return smallest_factor(self._drawn(draw, chosen), drop=drop)

    def _pools(self, draw: np.random.Generator) -> tuple[Floats, Floats | None]:
        """Loads [R, G] of pools, and their weights: all runs where one is a pool; drawn ones, alike, otherwise."""
        everyone = np.arange(self.documents)
        if self.pool > 1:
            return self._drawn(draw, everyone), None
        return self._shrunk(self.loads_NG, everyone), np.repeat(1.0 / self.sizes_D / self.documents, self.sizes_D)

    def _drawn(self, draw: np.random.Generator, chosen: Ints) -> Floats:
        """Loads [R, G] of pools of runs drawn from these documents."""
        document = chosen[draw.integers(len(chosen), size=(DRAWS, self.pool))]
        run = self.starts_D[document] + (draw.random((DRAWS, self.pool)) * self.sizes_D[document]).astype(int)
        loads_RG = np.zeros((DRAWS, self.loads_NG.shape[1]))
        for column in range(self.pool):
            loads_RG += self.loads_NG[run[:, column]]
        return self._shrunk(loads_RG / self.pool, chosen)

    def _shrunk(self, loads_RG: Floats, chosen: Ints) -> Floats:
        """The loads as they would be in runs of the wanted length."""
        if self.by_length is None:
            return loads_RG
        fitted = fit_variance(*self.by_length.variances(chosen))
        here = fitted(self.seen)
        scale = math.sqrt(fitted(self.wanted) / here) if here else 1.0
        mean_G = self.mean_DG[chosen].mean(axis=0)
        shrunk: Floats = mean_G + scale * (loads_RG - mean_G)
        return shrunk


def _runs(counts_BG: Ints, blocks: int) -> Floats:
    """Loads [runs, G] of all runs of so many consecutive blocks; a load is a share times G."""
    sums = np.concatenate([np.zeros((1, counts_BG.shape[1]), np.int64), counts_BG.cumsum(axis=0, dtype=np.int64)])
    runs = sums[blocks:] - sums[:-blocks]
    loads: Floats = runs * (counts_BG.shape[1] / runs.sum(axis=1, keepdims=True))
    return loads
