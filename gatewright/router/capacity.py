"""The capacity factor that keeps drops under a bound, from recorded routing.

The tokens of a document are not independent, so long contexts need almost as much room as short ones. A capacity pool
holds n documents of L tokens. Its share of assignments in group g of G (an expert, or an expert-parallel rank) is P_g,
and with capacity factor CF every group has room for CF / G:

    E[drop](CF) = Σ_g E (P_g − CF / G)₊

P_g is drawn by a block bootstrap: runs of consecutive blocks, as they stand in the documents. Where too few documents
reach L, shorter runs are drawn and their distance from the mean is shrunk to the variance that V(L) = τ² + a L^−β
gives (capacity_fit.py); their heavy tails, which a normal distribution lacks, stay. With n → ∞ only the mean share is
left: the floor, below which no length and no pool helps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gatewright.router.blocks import Ints, RoutingRecord
from gatewright.router.capacity_packs import LayerPacks
from gatewright.router.capacity_pools import LayerPools
from gatewright.router.drop import independent_factor, mean_drop, smallest_factor
from gatewright.spec.errors import DataError, UserError

Floats = npt.NDArray[np.float64]

LEAST_DOCUMENTS = 20
"""Documents that must reach the length: fewer say too little of how documents differ."""
SHORTEST_FIT = 4
"""Blocks that the documents of a fit must reach: 1, 2 and 4 make three lengths for three unknowns."""
RESAMPLES = 200
"""Resamples of the documents behind the upper bound."""
CONFIDENCE = 0.95
CLOSE = 0.95
"""Layers whose estimate is at least this part of the largest take part in the upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the factor is wanted for. Raises UserError for numbers that make no sense."""

    tokens: int
    """Tokens of a document in the micro-batch, L; of the micro-batch where it is a pack. Under context parallelism with
    capacity on the sender: L / cp."""
    packed: bool = False
    """Whether the micro-batch holds whole documents of any length, as many as fit into `tokens`."""
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
        if self.packed and self.documents > 1:
            raise UserError(f"documents = {self.documents}: a pack holds as many documents as fit; leave it at 1")
        if not 0.0 < self.drop < 1.0:
            raise UserError(
                f"drop = {self.drop:g}; wanted a share above 0 and below 1, such as 0.01. No sample can promise 0: "
                "stay dropless for that"
            )

    @property
    def pool(self) -> int:
        """Documents that share a capacity, n; packs, where micro-batches are packs."""
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
    """The same for an endless pool: no length and no pool makes a smaller one enough."""


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
    method: Literal["bootstrap", "fit", "packs"]
    documents: int
    """Documents that the estimate rests on."""
    longest_tokens: int
    """Longest runs that were seen: `tokens` for a bootstrap, shorter for a fit; for packs the longest document."""
    independent: float
    """What the same bound asks for if tokens were independent and experts alike: what the usual argument gives."""
    independent_drop: float
    """What that factor would drop, in the layer that drops most."""
    layers: tuple[LayerEstimate, ...]


def estimate_capacity(record: RoutingRecord, question: Question, *, seed: int = 0) -> CapacityEstimate:
    """The capacity factor for `question`. Raises DataError when the record holds too few long enough documents."""
    draw = np.random.default_rng(seed)
    basis, layers = _layers(record, question)
    floors = [smallest_factor(layer.mean_G[None], drop=question.drop) for layer in layers]
    # Drawn pools may come out a hair under what is certain.
    factors = [max(floor, layer.factor(draw, drop=question.drop)) for floor, layer in zip(floors, layers, strict=True)]
    worst = int(np.argmax(factors))
    close = [layer for layer, factor in zip(layers, factors, strict=True) if factor >= CLOSE * factors[worst]]
    resampled = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(layers[0].documents, size=layers[0].documents)
        resampled.append(max(layer.resampled_factor(draw, chosen, drop=question.drop) for layer in close))
    independent = independent_factor(
        groups=question.groups(record.experts),
        assignments=question.tokens * question.pool * record.top_k,
        drop=question.drop,
    )
    return CapacityEstimate(
        upper=max(factors[worst], float(np.quantile(resampled, CONFIDENCE))),
        factor=factors[worst],
        floor=max(floors),
        layer=record.layers[worst],
        method=basis.method,
        documents=layers[0].documents,
        longest_tokens=basis.longest_tokens,
        independent=independent,
        independent_drop=max(layer.drop(draw, factor=independent) for layer in layers),
        layers=tuple(
            LayerEstimate(layer=layer, factor=factor, floor=floor)
            for layer, factor, floor in zip(record.layers, factors, floors, strict=True)
        ),
    )


def estimate_drop(record: RoutingRecord, question: Question, factor: float, *, seed: int = 0) -> tuple[float, float]:
    """Mean share dropped with this factor in the layer that drops most, now and with an endless pool.

    The question's own bound plays no part. Raises as `estimate_capacity`, and UserError for a factor of 0 or less.
    """
    if not factor > 0:
        raise UserError(f"factor = {factor:g}; wanted more than 0")
    draw = np.random.default_rng(seed)
    _, layers = _layers(record, question)
    endless = max(mean_drop(layer.mean_G[None], factor) for layer in layers)
    return max(layer.drop(draw, factor=factor) for layer in layers), endless


Layer = LayerPools | LayerPacks


@dataclass(frozen=True, slots=True)
class _Basis:
    method: Literal["bootstrap", "fit", "packs"]
    longest_tokens: int


def _layers(record: RoutingRecord, question: Question) -> tuple[_Basis, Sequence[Layer]]:
    """What there is to draw pools from, for each layer."""
    groups = question.groups(record.experts)
    return _packs(record, question, groups) if question.packed else _runs(record, question, groups)


def _packs(record: RoutingRecord, question: Question, groups: int) -> tuple[_Basis, list[LayerPacks]]:
    """Documents that a pack can hold."""
    tokens, counts = record.whole_documents()
    fits = tokens <= question.tokens
    if fits.sum() < LEAST_DOCUMENTS:
        raise DataError(
            f"too few documents: {fits.sum()} of {record.documents} fit into {question.tokens:,} tokens, wanted "
            f"{LEAST_DOCUMENTS}; measure more with `gatewright router measure RUN.yaml --documents N`, or ask for "
            "longer packs"
        )
    grouped, room = _grouped(counts[fits], groups), question.tokens * question.pool
    layers = [LayerPacks(grouped[:, row], tokens[fits], room) for row in range(len(record.layers))]
    return _Basis("packs", int(tokens[fits].max())), layers


def _runs(record: RoutingRecord, question: Question, groups: int) -> tuple[_Basis, list[LayerPools]]:
    """Runs of the documents that are long enough, or else of the longest length that enough of them have."""
    if question.tokens < record.block_tokens:
        raise UserError(
            f"tokens = {question.tokens}: routing was recorded in blocks of {record.block_tokens}; wanted as many"
        )
    # Rounded down: a shorter run varies more, so the answer errs on the side of room.
    blocks = question.tokens // record.block_tokens
    documents = [_grouped(counts, groups) for counts in record.whole_blocks()]
    used = [counts for counts in documents if len(counts) >= blocks]
    enough = len(used) >= LEAST_DOCUMENTS
    seen = blocks if enough else _longest_run(documents)
    if not enough and seen < SHORTEST_FIT:
        raise DataError(
            f"too few documents: {len(used)} of {record.documents} have {question.tokens:,} tokens, and fewer than "
            f"{LEAST_DOCUMENTS} have {SHORTEST_FIT * record.block_tokens:,}, the least that a fit needs; measure more "
            "with `gatewright router measure RUN.yaml --documents N`, or ask with --packed for packs of whole documents"
        )
    used = [counts for counts in documents if len(counts) >= seen]
    by_layer = [[counts[:, row] for counts in used] for row in range(len(record.layers))]
    layers = [LayerPools(documents, blocks, question.pool) for documents in by_layer]
    return _Basis("bootstrap" if enough else "fit", seen * record.block_tokens), layers


def _longest_run(documents: Sequence[Ints]) -> int:
    """Longest run, in blocks, that LEAST_DOCUMENTS documents have."""
    lengths = sorted((len(counts) for counts in documents), reverse=True)
    return lengths[LEAST_DOCUMENTS - 1] if len(lengths) >= LEAST_DOCUMENTS else 0


def _grouped(counts_BLE: Ints, groups: int) -> Ints:
    """[B, L, G]: the experts of each group together, in their order. B blocks, or documents."""
    rows, layers, experts = counts_BLE.shape
    grouped: Ints = counts_BLE.reshape(rows, layers, groups, experts // groups).sum(axis=3)
    return grouped
