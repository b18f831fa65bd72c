"""Layout: how a model and its optimizer state are spread over ranks, and what a number of ranks allows.

Ranks are numbered with the expert-parallel group innermost, so that it stays within a node while it fits one:

    rank = (copy · edp + expert copy) · ep + expert rank         e.g. 8 ranks, ep 2, dp_replicate 2:

    copy          0                 1            a whole model, sharded over its shard ranks
    expert copy   0       1         0       1    the same experts, other tokens
    expert rank   0   1   0   1     0   1   0   1
"""

from dataclasses import dataclass
from typing import Literal

from gatewright.spec.errors import RunFileError
from gatewright.spec.run import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the groups, and what is divided over them."""

    ranks: int = 1
    ep: int = 1
    """Ranks that hold the experts of a layer together, each its own."""
    dense: Literal["replicate", "zero2", "zero3"] = "replicate"
    copies: int = 1
    """Copies of the sharded model (HSDP)."""
    cuts: bool = False
    """Documents may be cut over ranks, which takes aligned groups of them."""

    @property
    def shard(self) -> int:
        """Ranks of one copy."""
        return self.ranks // self.copies

    @property
    def edp(self) -> int:
        """Ranks of one copy that hold the same experts."""
        return self.shard // self.ep

    def describe(self) -> str:
        """E.g. `4 ranks: ep 2, zero2`."""
        if self.ranks == 1:
            return "1 rank"
        parts = [f"ep {self.ep}"] * (self.ep > 1) + [self.dense] + [f"{self.copies} copies"] * (self.copies > 1)
        return f"{self.ranks} ranks: {', '.join(parts)}"


def layout_of(parallel: Parallel | Literal["auto"], *, ranks: int) -> Layout:
    """The layout a run file asks for on so many ranks; auto, where the planner was not asked, replicates.

    Raises RunFileError for one that cannot be.
    """
    if parallel == "auto":
        return Layout(ranks=ranks)
    if isinstance(parallel.cp, int) and ranks % parallel.cp:
        raise RunFileError(f"parallel.cp = {parallel.cp} does not divide the {ranks} ranks; use {_divisors(ranks)}")
    if ranks == 1 and parallel.ep * parallel.dp_replicate > 1:
        key, size = ("ep", parallel.ep) if parallel.ep > 1 else ("dp_replicate", parallel.dp_replicate)
        raise RunFileError(
            f"parallel.{key} = {size} needs several ranks, and this is one process; start it with "
            "--nproc N, with torchrun, or with srun and a task a GPU"
        )
    if ranks % parallel.dp_replicate:
        raise RunFileError(
            f"parallel.dp_replicate = {parallel.dp_replicate} does not divide the {ranks} ranks; use {_divisors(ranks)}"
        )
    shard = ranks // parallel.dp_replicate
    if shard % parallel.ep:
        each = f"{shard} ranks of a copy" if parallel.dp_replicate > 1 else f"{ranks} ranks"
        raise RunFileError(f"parallel.ep = {parallel.ep} does not divide the {each}; use {_divisors(shard)}")
    return Layout(
        ranks=ranks, ep=parallel.ep, dense=parallel.dense, copies=parallel.dp_replicate, cuts=parallel.cp != 1
    )


def refuse_experts(layout: Layout, experts: int) -> None:
    """Raises RunFileError where the experts of a layer cannot be dealt to the expert-parallel ranks."""
    if layout.ep == 1:
        return
    if not experts:
        raise RunFileError(f"parallel.ep = {layout.ep}: this model has no routed experts; set ep: 1")
    if experts % layout.ep:
        raise RunFileError(
            f"parallel.ep = {layout.ep} does not divide the {experts} experts of a layer; use {_divisors(experts)}"
        )


def _divisors(number: int) -> str:
    found = [str(value) for value in range(1, number + 1) if number % value == 0]
    return ", ".join(found[:12])
