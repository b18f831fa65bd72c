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
        size = self.form.matrix_bytes
        every = self.shares.gather(self.parts["bytes"])[: self.matrices * size]
        return self.form.unpack(every.view(self.matrices, size)).dense(dtype)

    @property
    def own_EB(self) -> Tensor | None:
        """The run as [matrices, bytes of one], where it is one of whole matrices of a stack."""
        if self.matrices % self.shares.count:
            return None
        return self.parts["bytes"].view(self.matrices // self.shares.count, -1)


def divided(make: Callable[[range], QuantizedWeight], rows: range, shares: Shares) -> DividedWeight:
    """This process's part of the weight that `make` gives for these rows of a stack, or for a matrix, of one row.

    Of a stack whose matrices the number of processes divides, no others than its own are made.
    """
    if len(rows) % shares.count == 0:
        count = len(rows) // shares.count
        own = make(rows[shares.position * count : (shares.position + 1) * count])
        packed_EB = own.packed_EB()
        mine = packed_EB.view(-1)
    else:
        own = make(rows)
        packed_EB = own.packed_EB()
        share = -(-packed_EB.numel() // shares.count)
        mine = packed_EB.view(-1)[shares.position * share :][:share]
        mine = F.pad(mine, (0, share - len(mine)))
    form = own.unpack(packed_EB.new_empty(len(rows), own.matrix_bytes, device="meta"))
    # A copy: the run must not keep the rest of the weight in memory.
    return DividedWeight({"bytes": mine.clone()}, shape=form.shape, dtype=form.dtype, form=form, shares=shares)
