"""A frozen weight in few bits that processes divide: each keeps a run of its bytes, and all gather them to multiply."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gatewright.model.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The processes that divide a weight among them, and which of them this one is."""

    count: int
    position: int
    gather: Callable[[Tensor], Tensor]
    """The equal runs of bytes of all of them, one after the other; all must call it."""


class DividedWeight(QuantizedWeight):
    """`bytes`: this process's run, of equal ones, of the packed bytes of the matrices one after the other."""

    def __init__(
        self, parts: dict[str, Tensor], *, shape: torch.Size, dtype: torch.dtype, form: QuantizedWeight, shares: Shares
    ) -> None:
        """`form`: the whole weight in its format, on meta."""
        super().__init__(parts, shape=shape, dtype=dtype, form=form, shares=shares)
        self.form = form
        self.shares = shares

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole weight in `dtype`; every process that has a part of it must come here."""
        return self._gathered().dense(dtype)

    def _gathered(self) -> QuantizedWeight:
        size = self.form.matrix_bytes
        every = self.shares.gather(self.parts["bytes"])[: self.matrices * size]
        return self.form.unpack(every.view(self.matrices, size))

    @property
    def own_EB(self) -> Tensor | None:
        """The run as [matrices, bytes of one], where it is one of whole matrices of a stack."""
        if self.matrices % self.shares.count:
            return None
        return self.parts["bytes"].view(self.matrices // self.shares.count, -1)


def divided(
    pack: Callable[[range], QuantizedWeight], rows: range, shares: Shares, *, at_once: int = 1
) -> DividedWeight:
    """This process's part of the weight that `pack` gives for these rows of a stack, or for a matrix, of one row.

    Of a stack whose matrices the number of processes divides, no others than its own are packed. `at_once`: how many
    rows are asked for at one time; no more than so many are in memory beside what stays.
    """
    whole_matrices = len(rows) % shares.count == 0
    if whole_matrices:
        count = len(rows) // shares.count
        own = rows[shares.position * count : (shares.position + 1) * count]
    else:
        own = rows
    some = pack(own[:at_once])
    packed_EB = torch.empty(len(own), some.matrix_bytes, dtype=torch.uint8, device=some.device)
    packed_EB[:at_once] = some.packed_EB()
    for begin in range(at_once, len(own), at_once):
        packed_EB[begin : begin + at_once] = pack(own[begin : begin + at_once]).packed_EB()
    mine = packed_EB.view(-1)
    if not whole_matrices:
        share = -(-len(mine) // shares.count)
        mine = mine[shares.position * share :][:share]
        mine = F.pad(mine, (0, share - len(mine))).clone()  # the run must not keep the rest in memory
    form = some.unpack(packed_EB.new_empty(len(rows), some.matrix_bytes, device="meta"))
    return DividedWeight({"bytes": mine}, shape=form.shape, dtype=form.dtype, form=form, shares=shares)
