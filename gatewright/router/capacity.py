"""The capacity factor that keeps drops under a bound, from recorded routing: the segments of a document are not
independent tokens, so long contexts need almost as much room as short ones.

A capacity pool holds n documents of L tokens. Its share of assignments in group g of G (an expert, or an
expert-parallel rank) is P_g, and with capacity factor CF every group has room for CF / G:

    E[drop](CF) = Σ_g E (P_g − CF / G)₊

P_g is drawn by a block bootstrap: runs of consecutive blocks, as they stand in the documents. Where too few documents
reach L, shorter runs are drawn and their distance from the mean is shrunk to the variance that V(L) = τ² + a L^−β
gives (capacity_fit.py); their heavy tails, which a normal distribution lacks, stay. With n → ∞ only the mean share is
left: the floor, below which no length and no pool helps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gatewright.router.blocks import Ints, RoutingRecord
from gatewright.router.capacity_fit import SharesByLength, fit_variance
from gatewright.spec.errors import DataError, UserError

Floats = npt.NDArray[np.float64]

LEAST_DOCUMENTS = 20
"""Documents that must reach the length: fewer say too little of how documents differ."""
DRAWS = 1000
"""Pools drawn for one estimate."""
RESAMPLES = 200
"""Resamples of the documents behind the upper bound."""
CONFIDENCE = 0.95
CLOSE = 0.95
"""Layers whose estimate is at least this part of the largest take part in the upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the factor is wanted for. Raises UserError for numbers that make no sense."""

    tokens: int
    """Tokens of a document in the micro-batch, L. Under context parallelism with capacity on the sender: L / cp."""
    documents: int = 1
    """Documents in a rank's micro-batch."""
    ep: int = 1
    """Expert-parallel size."""
    per: Literal["expert", "rank"] = "expert"
    """expert: room for each expert in its own rank's micro-batch. rank: one buffer for the experts of a rank together,
    filled by the micro-batches of all `ep` ranks."""
    drop: float = 0.01
    """Largest mean share of assignments that may be dropped."""

    def __post_init__(self) -> None:
        for name, number in (("tokens", self.tokens), ("documents", self.documents), ("ep", self.ep)):
            if number < 1:
                raise UserError(f"{name} = {number}; wanted at least 1")
        if not 0.0 < self.drop < 1.0:
            raise UserError(
                f"drop = {self.drop:g}; wanted a share above 0 and below 1, such as 0.01. No sample can promise 0: "
                "stay dropless for that"
            )

    @property
    def pool(self) -> int:
        """Documents that share a capacity, n."""
        return self.documents * (self.ep if self.per == "rank" else 1)

    def groups(self, experts: int) -> int:
        """Groups that have a capacity each, G. Raises UserError where `ep` does not divide the experts."""
        if experts % self.ep:
            fitting = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
            raise UserError(f"ep = {self.ep} does not divide {experts} experts; use one of {fitting}")
        return self.ep if self.per == "rank" else experts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEstimate:
    layer: int
    factor: float
    """Smallest factor that keeps the expected drop of this layer under the bound."""
    floor: float
    """The same for an endless pool: no length or pool makes a smaller one enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityEstimate:
    """The smallest capacity factor under the bound in every layer."""

    upper: float
    """Upper bound of `factor` over resamples of the documents, at CONFIDENCE. This is the one to set."""
    factor: float
    """Estimate, of the layer that needs most."""
    floor: float
    layer: int
    """Layer index of that layer."""
    method: Literal["bootstrap", "fit"]
    documents: int
    """Documents that the estimate rests on."""
    longest_tokens: int
    """Longest runs that were seen: `tokens` for a bootstrap, shorter for a fit."""
    independent: float
    """What the same bound asks for if tokens were independent and experts alike: what the usual argument gives."""
    layers: tuple[LayerEstimate, ...]


def estimate_capacity(record: RoutingRecord, question: Question, *, seed: int = 0) -> CapacityEstimate:
    """The capacity factor for `question`. Raises DataError when the record holds too few long enough documents."""
    groups = question.groups(record.experts)
    blocks = _whole_blocks(question.tokens, record.block_tokens)
    documents = [_grouped(counts, groups) for counts in record.whole_blocks()]
    long_enough = [counts for counts in documents if len(counts) >= blocks]
    bootstrap = len(long_enough) >= LEAST_DOCUMENTS
    used = long_enough if bootstrap else [counts for counts in documents if len(counts) >= _longest_run(documents)]
    if not bootstrap:
        _refuse_too_little(documents, question, record.block_tokens)
    draw = np.random.default_rng(seed)
    layers = [_Layer([counts[:, row] for counts in used], blocks, question) for row in range(len(record.layers))]
    factors = [layer.factor(draw) for layer in layers]
    worst = int(np.argmax(factors))
    close = [layer for layer, factor in zip(layers, factors, strict=True) if factor >= CLOSE * factors[worst]]
    resampled = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(len(used), size=len(used))
        resampled.append(max(layer.resampled_factor(draw, chosen) for layer in close))
    floors = [smallest_factor(layer.mean_G[None], drop=question.drop) for layer in layers]
    return CapacityEstimate(
        upper=max(factors[worst], float(np.quantile(resampled, CONFIDENCE))),
        factor=factors[worst],
        floor=max(floors),
        layer=record.layers[worst],
        method="bootstrap" if bootstrap else "fit",
        documents=len(used),
        longest_tokens=record.block_tokens * layers[0].blocks,
        independent=independent_factor(
            groups=groups, assignments=question.tokens * question.pool * record.top_k, drop=question.drop
        ),
        layers=tuple(
            LayerEstimate(layer=layer, factor=factor, floor=floor)
            for layer, factor, floor in zip(record.layers, factors, floors, strict=True)
        ),
    )


def smallest_factor(loads_RG: Floats, *, drop: float, weights_R: Floats | None = None) -> float:
    """Smallest CF with mean over pools of Σ_g (load − CF)₊ / G ≤ drop; loads are shares times G (fair is 1).

    The drop is convex and piecewise linear in CF, the largest of the lines (S_i − i·CF) / (R·G) over the i largest
    loads with sum S_i; so CF is the largest of (S_i − drop·R·G) / i.
    """
    pools, groups = loads_RG.shape
    weights_R = np.full(pools, 1.0 / pools) if weights_R is None else weights_R
    # The mean load is 1, so no factor under this can do, and smaller loads never exceed the one that does.
    least = 1.0 - drop
    heavy = loads_RG > least
    loads = loads_RG[heavy]
    mass = np.broadcast_to(weights_R[:, None], loads_RG.shape)[heavy]
    order = np.argsort(-loads)
    sums, mass = np.cumsum((loads * mass)[order]), np.cumsum(mass[order])
    return max(least, float(((sums - drop * groups) / mass).max()))


def independent_factor(*, groups: int, assignments: int, drop: float) -> float:
    """The factor if all assignments were independent and every group as likely as another.

    Normal approximation, G s [φ(z) − z (1 − Φ(z))] ≤ drop with s² = (1 − 1/G) / (G·N) and z = (CF − 1) / (G·s).
    """
    spread = math.sqrt((1.0 - 1.0 / groups) / groups / assignments)

    def dropped(factor: float) -> float:
        z = (factor - 1.0) / groups / max(spread, 1e-12)
        density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return groups * spread * (density - z * 0.5 * math.erfc(z / math.sqrt(2.0)))

    low, high = 0.0, float(groups)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if dropped(middle) <= drop else (middle, high)
    return high


def drop_share(counts_RG: Ints, factor: float) -> Floats:
    """[R] share of each pool's assignments that exceed a capacity of ⌈factor × assignments / G⌉ a group."""
    assignments = counts_RG.sum(axis=1)
    room = np.ceil(factor * assignments / counts_RG.shape[1])
    over: Floats = np.clip(counts_RG - room[:, None], 0, None).sum(axis=1) / assignments
    return over


# --- one layer ------------------------------------------------------------------------------------------------------


class _Layer:
    """A layer's runs of consecutive blocks; every document, and every run in it, is as likely as another.

    N runs in D documents, R pools drawn.
    """

    def __init__(self, documents: Sequence[Ints], blocks: int, question: Question) -> None:
        """documents: counts [blocks, G] each. Where one is shorter than `blocks`, the longest runs of all serve."""
        self.question = question
        self.wanted = blocks
        self.blocks = min(blocks, min(len(counts) for counts in documents))
        runs = [_runs(counts, self.blocks) for counts in documents]
        self.loads_NG = np.concatenate(runs)
        self.mean_DG = np.stack([run.mean(axis=0) for run in runs])
        self.sizes_D = np.array([len(run) for run in runs])
        self.starts_D = np.cumsum(self.sizes_D) - self.sizes_D
        self.by_length = SharesByLength(documents) if self.blocks < blocks else None

    @property
    def mean_G(self) -> Floats:
        mean: Floats = self.mean_DG.mean(axis=0)
        return mean

    def factor(self, draw: np.random.Generator) -> float:
        """From all runs where one is a pool; from drawn pools otherwise."""
        everyone = np.arange(len(self.sizes_D))
        if self.question.pool > 1:
            return self.resampled_factor(draw, everyone)
        weights_N = np.repeat(1.0 / self.sizes_D / len(self.sizes_D), self.sizes_D)
        return smallest_factor(self._shrunk(self.loads_NG, everyone), drop=self.question.drop, weights_R=weights_N)

    def resampled_factor(self, draw: np.random.Generator, chosen: Ints) -> float:
        """From pools of the documents with the numbers `chosen`, some of them perhaps twice."""
        pool = self.question.pool
        document = chosen[draw.integers(len(chosen), size=(DRAWS, pool))]
        run = self.starts_D[document] + (draw.random((DRAWS, pool)) * self.sizes_D[document]).astype(int)
        loads_RG = np.zeros((DRAWS, self.loads_NG.shape[1]))
        for column in range(pool):
            loads_RG += self.loads_NG[run[:, column]]
        return smallest_factor(self._shrunk(loads_RG / pool, chosen), drop=self.question.drop)

    def _shrunk(self, loads_RG: Floats, chosen: Ints) -> Floats:
        """The loads as they would be in runs of the wanted length."""
        if self.by_length is None:
            return loads_RG
        fitted = fit_variance(*self.by_length.variances(chosen))
        here = fitted(self.blocks)
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


# --- what a record can answer ---------------------------------------------------------------------------------------


def _grouped(counts_BLE: Ints, groups: int) -> Ints:
    """[B, L, G]: the experts of each group together, in their order."""
    blocks, layers, experts = counts_BLE.shape
    grouped: Ints = counts_BLE.reshape(blocks, layers, groups, experts // groups).sum(axis=3)
    return grouped


def _whole_blocks(tokens: int, block_tokens: int) -> int:
    if tokens < block_tokens:
        raise UserError(
            f"tokens = {tokens}: routing was recorded in blocks of {block_tokens} tokens; ask for that or more"
        )
    return round(tokens / block_tokens)


def _longest_run(documents: Sequence[Ints]) -> int:
    """Longest run, in blocks, that LEAST_DOCUMENTS documents have."""
    lengths = sorted((len(counts) for counts in documents), reverse=True)
    return lengths[LEAST_DOCUMENTS - 1] if len(lengths) >= LEAST_DOCUMENTS else 0


def _refuse_too_little(documents: Sequence[Ints], question: Question, block_tokens: int) -> None:
    longest = _longest_run(documents)
    if longest < 4:
        reach = sum(len(counts) * block_tokens >= question.tokens for counts in documents)
        raise DataError(
            f"too few documents: {reach} of {len(documents)} have {question.tokens:,} tokens, and fewer than "
            f"{LEAST_DOCUMENTS} have {4 * block_tokens:,}, the least that a fit needs; measure more with "
            "`gatewright router measure RUN.yaml --documents N`, or ask for shorter ones"
        )
