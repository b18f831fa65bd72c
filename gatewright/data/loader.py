"""Batches of a step, as a pure function of the step's number, so that a resumed run needs no position to restore.

The packs of a step do not depend on how many ranks share them: rank r of n takes every n-th, beginning with the r-th.
All ranks get equally many; where packs run out, fillers that hold nothing.

With context parallelism the plan has one pack a step, and a schedule deals its documents, whole or cut, to the ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gatewright.data.batch import Batch, filler, make_batch, make_slices
from gatewright.data.view import DocumentView
from gatewright.packing.arrays import IntArray
from gatewright.packing.cost import CostModel, Rates
from gatewright.packing.epoch import EpochPlan
from gatewright.packing.exchange_cost import Heads, Name, choose
from gatewright.packing.exchange_plan import plan
from gatewright.packing.schedule import MicroBatch, Slice, schedule

SOLVER_SHARE = 0.01
"""Of a step's time that the search for its schedule may take, in a thread of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How documents are cut into slices for ranks."""

    capacity: int
    """Tokens that a rank holds in a micro-batch."""
    costs: CostModel
    size: int | None
    """Ranks that share each document; None: as many as the schedule finds best, document by document."""
    heads: Heads
    """Of a layer, for the price of an exchange."""
    rates: Rates
    exchanges: tuple[Name, ...]
    """To choose from in each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Turns the packs of a plan into batches of the documents they name."""

    view: DocumentView
    plan: EpochPlan
    packs_per_step: int
    """Of all ranks together."""
    rank: int = 0
    ranks: int = 1
    cut: Cut | None = None
    """None: documents stay whole."""

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, counted from 0."""
        packs = self.plan.micro_batches(step, self.packs_per_step)
        return list(self._dealt(packs) if self.cut is None else self._scheduled(packs, self.cut))

    def whole(self) -> Iterator[Batch]:
        """This rank's part of one pass over all documents in an order that no seed has touched, for evaluation."""
        packs = self.plan.in_order()
        if self.cut is None:
            yield from self._dealt([packs[k] for k in range(len(packs))])
            return
        for k in range(len(packs)):
            yield from self._scheduled([packs[k]], self.cut)

    def every_rank(self) -> "Loader":
        """The same, with all packs on this rank, and documents whole."""
        if self.cut is None:
            return replace(self, rank=0, ranks=1)
        capacity = max(self.cut.capacity, int(self.view.lengths.max()))
        plan = EpochPlan(self.view.lengths, capacity=capacity, seed=self.plan.seed)
        return replace(self, rank=0, ranks=1, cut=None, plan=plan)

    def _dealt(self, packs: Sequence[IntArray]) -> Iterator[Batch]:
        for first in range(0, len(packs), self.ranks):
            mine = first + self.rank
            yield make_batch(self.view, packs[mine].tolist()) if mine < len(packs) else filler()

    def _scheduled(self, packs: Sequence[IntArray], cut: Cut) -> Iterator[Batch]:
        for slices in self._slices(packs, cut):
            chosen = choose(slices, heads=cut.heads, rates=cut.rates, among=cut.exchanges)
            # A rank that has nothing runs a filler, which is a document of its own to the exchange.
            filled = [held or [Slice(-1 - rank, 0, 1)] for rank, held in enumerate(slices)]
            part = plan(filled, self.rank, chosen)
            made = make_slices(self.view, slices[self.rank], part) if slices[self.rank] else filler(part)
            yield replace(made, exchange_name=_named(chosen))

    def exchanges(self, step: int) -> dict[str, int]:
        """Micro-batches of a step by the exchange they make, on any rank; `whole`: those that cut no document."""
        assert self.cut is not None
        counts: dict[str, int] = {}
        for slices in self._slices(self.plan.micro_batches(step, self.packs_per_step), self.cut):
            chosen = choose(slices, heads=self.cut.heads, rates=self.cut.rates, among=self.cut.exchanges)
            counts[_named(chosen)] = counts.get(_named(chosen), 0) + 1
        return counts

    def _slices(self, packs: Sequence[IntArray], cut: Cut) -> Iterator[list[list[Slice]]]:
        """[ranks] of each micro-batch."""
        documents = np.concatenate(packs)
        planned = schedule(
            self.view.lengths[documents],
            ranks=self.ranks,
            capacity=cut.capacity,
            costs=cut.costs,
            size=cut.size,
            share=SOLVER_SHARE,
        )
        for micro_batch in planned.micro_batches:
            yield _numbered(micro_batch, documents)


def _named(chosen: tuple[Name, int] | None) -> str:
    return f"{chosen[0]} over {chosen[1]}" if chosen else "whole"


def _numbered(micro_batch: MicroBatch, documents: IntArray) -> list[list[Slice]]:
    """[ranks] Slices by the view's numbers of documents."""
    numbers = documents.tolist()
    return [[Slice(numbers[piece], start, end) for piece, start, end in held] for held in micro_batch.slices]
