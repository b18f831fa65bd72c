"""Batches of a step, as a pure function of the step's number, so that a resumed run needs no position to restore.

The packs of a step do not depend on how many ranks share them: rank r of n takes every n-th, beginning with the r-th.
All ranks get equally many; where packs run out, fillers that hold nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gatewright.data.batch import Batch, filler, make_batch
from gatewright.data.view import DocumentView
from gatewright.packing.epoch import EpochPlan
from gatewright.packing.pack import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Turns the packs of a plan into batches of the documents they name."""

    view: DocumentView
    plan: EpochPlan
    packs_per_step: int
    """Of all ranks together."""
    rank: int = 0
    ranks: int = 1

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, counted from 0."""
        packs = self.plan.micro_batches(step, self.packs_per_step)
        return list(self._dealt(packs))

    def whole(self) -> Iterator[Batch]:
        """This rank's part of one pass over all documents in an order that no seed has touched, for evaluation."""
        packs = self.plan.in_order()
        yield from self._dealt([packs[k] for k in range(len(packs))])

    def every_rank(self) -> "Loader":
        """The same, with all packs on this rank."""
        return replace(self, rank=0, ranks=1)

    def _dealt(self, packs: Sequence[IntArray]) -> Iterator[Batch]:
        for first in range(0, len(packs), self.ranks):
            mine = first + self.rank
            yield make_batch(self.view, packs[mine].tolist()) if mine < len(packs) else filler()
