"""Batches of a step, as a pure function of the step's number, so that a resumed run needs no position to restore."""

from collections.abc import Iterator
from dataclasses import dataclass

from gatewright.data.batch import Batch, make_batch
from gatewright.data.view import DocumentView
from gatewright.packing.epoch import EpochPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Turns the packs of a plan into batches of the documents they name."""

    view: DocumentView
    plan: EpochPlan
    packs_per_step: int

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step, counted from 0."""
        packs = self.plan.micro_batches(step, self.packs_per_step)
        return [make_batch(self.view, documents.tolist()) for documents in packs]

    def whole(self) -> Iterator[Batch]:
        """One pass over all documents in an order that no seed has touched, for evaluation."""
        packs = self.plan.in_order()
        for k in range(len(packs)):
            yield make_batch(self.view, packs[k].tolist())
