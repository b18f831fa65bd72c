"""The endless stream of packs, each epoch drawn anew, so that a step's number alone says what it trains on."""

import numpy as np

from gatewright.packing.alike import alike_in_steps
from gatewright.packing.arrays import IntArray
from gatewright.packing.pack import Packs, pack, sum_bound


class EpochPlan:
    """Which documents each micro-batch holds, as a pure function of (lengths, capacity, seed, pack) and its number.

    Packs are numbered from 0 through all epochs; epoch e holds packs [e × packs_per_epoch, (e + 1) × packs_per_epoch).
    """

    def __init__(
        self, lengths: IntArray, *, capacity: int, seed: int, pack: bool = True, alike_per_step: int | None = None
    ) -> None:
        """`pack=False` puts one document in a micro-batch. Raises ValueError for a document longer than `capacity`.

        alike_per_step: packs of a step, so that those of one step cost about the same; where several ranks share a
        step they wait less for each other. It moves packs between steps: a run is resumed with the value it began with.
        """
        self.lengths = lengths
        self.capacity = capacity
        self.seed = seed
        self.pack = pack
        self.alike_per_step = alike_per_step
        self._drawn: dict[int, Packs] = {}
        self.packs_per_epoch = len(self.in_order())

    def packs(self, epoch: int) -> Packs:
        """The packs of one epoch: the same documents, the same number of packs, another draw."""
        if epoch not in self._drawn:
            drawn = self._draw([self.seed, epoch])
            if per_step := self.alike_per_step:
                lead = min(-epoch * len(drawn) % per_step, len(drawn))
                drawn = alike_in_steps(drawn, self.lengths, per_step=per_step, lead=lead, seed=[self.seed, epoch, 1])
            assert len(drawn) == self.packs_per_epoch, "the number of packs must not depend on the draw"
            # A step may straddle two epochs; older ones are not asked for again.
            self._drawn = {e: p for e, p in self._drawn.items() if e == epoch - 1} | {epoch: drawn}
        return self._drawn[epoch]

    def in_order(self) -> Packs:
        """One pass over the documents that no seed has touched, for evaluation."""
        return self._draw(None)

    def micro_batches(self, step: int, per_step: int) -> list[IntArray]:
        """Document indices of each micro-batch of a step (counted from 0), `per_step` of them."""
        numbers = range(step * per_step, (step + 1) * per_step)
        return [self.packs(n // self.packs_per_epoch)[n % self.packs_per_epoch] for n in numbers]

    def _draw(self, seed: list[int] | None) -> Packs:
        if self.pack:
            return pack(self.lengths, self.capacity, seed=seed)
        return _one_each(self.lengths, self.capacity, seed=seed)


def _one_each(lengths_N: IntArray, capacity: int, *, seed: list[int] | None) -> Packs:
    documents = len(lengths_N)
    if documents and (longest := int(lengths_N.max())) > capacity:
        raise ValueError(f"a document has {longest} tokens, more than a micro-batch can hold ({capacity})")
    order = np.arange(documents)
    if seed is not None:
        order = np.random.Generator(np.random.PCG64(seed)).permutation(documents)
    return Packs(
        order=order,
        offsets=np.arange(documents + 1),
        capacity=capacity,
        tokens=int(lengths_N.sum()),
        lower_bound=sum_bound(lengths_N, capacity),
    )
