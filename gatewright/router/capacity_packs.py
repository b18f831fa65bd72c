"""Capacity pools of one layer where micro-batches are packs: whole documents, as many as fit.

D documents, R pools, G groups that have a capacity each; a load is a share times G.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gatewright.router.capacity_pools import DRAWS
from gatewright.router.drop import mean_drop, smallest_factor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]


MANY = 500
"""Documents in a pool from which on one more or less, where the pool ends, is nothing: their number is then fixed."""


class LayerPacks:
    """A layer's documents, drawn one after the other, each as likely as another, until the next would not fit."""

    def __init__(self, counts_DG: Ints, tokens_D: Ints, room_tokens: int) -> None:
        """counts_DG: assignments of each document; tokens_D: its length, none over `room_tokens`."""
        self.counts_DG = counts_DG.astype(float)
        self.tokens_D = tokens_D
        self.room_tokens = room_tokens

    @property
    def mean_G(self) -> Floats:
        """Loads of an endless pool."""
        total_G = self.counts_DG.sum(axis=0)
        mean: Floats = total_G * (len(total_G) / total_G.sum())
        return mean

    @property
    def documents(self) -> int:
        return len(self.tokens_D)

    def factor(self, draw: np.random.Generator, *, drop: float) -> float:
        """Smallest factor whose expected drop is no more than `drop`."""
        return self.resampled_factor(draw, np.arange(self.documents), drop=drop)

    def drop(self, draw: np.random.Generator, *, factor: float) -> float:
        """Expected drop with this factor."""
        return mean_drop(self._drawn(draw, np.arange(self.documents)), factor)

    def resampled_factor(self, draw: np.random.Generator, chosen: Ints, *, drop: float) -> float:
        """The factor if the documents were those with the numbers `chosen`, some of them perhaps twice."""
        return smallest_factor(self._drawn(draw, chosen), drop=drop)

    def _drawn(self, draw: np.random.Generator, chosen: Ints) -> Floats:
        """Loads [R, G]. Counts how often each pool holds each document, so that the rest is one matrix product."""
        documents = self.room_tokens / self.tokens_D[chosen].mean()
        if documents > MANY:
            share_D = np.bincount(chosen, minlength=self.documents) / len(chosen)
            return self._loads(draw.multinomial(int(documents), share_D, size=DRAWS))
        enough = int(2.0 * documents) + 16
        drawn_RM = chosen[draw.integers(len(chosen), size=(DRAWS, enough))]
        fits_RM = self.tokens_D[drawn_RM].cumsum(axis=1) <= self.room_tokens
        pool_RM = np.broadcast_to(np.arange(DRAWS)[:, None], drawn_RM.shape)
        flat = (pool_RM * self.documents + drawn_RM)[fits_RM]
        times_RD = np.bincount(flat, minlength=DRAWS * self.documents).reshape(DRAWS, self.documents)
        return self._loads(times_RD)

    def _loads(self, times_RD: Ints) -> Floats:
        counts_RG = times_RD @ self.counts_DG
        loads: Floats = counts_RG * (counts_RG.shape[1] / counts_RG.sum(axis=1, keepdims=True))
        return loads
