"""Ranks: this process among the others, their groups, and the few sums they make together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gatewright.parallel.layout import Layout
from gatewright.parallel.place import ALONE, Place

SHARD, EXPERT_COPIES, ALL = "shard", "expert_copies", "all"
DIMENSIONS = ("copy", "edp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process and its groups. Alone, there is no process group, and every sum is the value itself."""

    place: Place = ALONE
    layout: Layout = Layout()
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None
    """Dimensions copy, edp, ep (layout.py), with `shard` = edp × ep flattened; None: alone."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints, and writes what all have in common."""
        return self.place.rank == 0

    @property
    def alone(self) -> bool:
        return self.mesh is None

    def part(self, name: str) -> DeviceMesh:
        """The sub-mesh of that name that this rank belongs to: copy, edp, ep or shard."""
        assert self.mesh is not None
        return self.mesh[name]

    def position(self, name: str) -> int:
        """This rank's number within that sub-mesh; 0 alone."""
        return 0 if self.mesh is None else self.mesh[name].get_local_rank()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on every rank, of a tensor on the CPU or the device; the tensor is overwritten."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of each rank, by rank."""
        if self.alone:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [row.tolist() for row in every]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(int(flag)))) if not self.alone else flag

    def wait(self) -> None:
        """Returns when every rank has come here."""
        if not self.alone:
            self.sum(torch.zeros(()))


@contextmanager
def join_ranks(place: Place, layout: Layout, *, device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """Joins the process group for the block: NCCL or RCCL between GPUs, gloo between CPUs and for control.

    A collective that a rank does not come to fails on the others after `timeout_s`.
    """
    if place.size == 1:
        yield Ranks(place=place, layout=layout, device=device)
        return
    _set_diagnostics()
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"tcp://{place.address}:{place.port}" if "TORCHELASTIC_RUN_ID" not in os.environ else "env://",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    try:
        mesh = init_device_mesh(device.type, (layout.copies, layout.edp, layout.ep), mesh_dim_names=DIMENSIONS)
        mesh["edp", "ep"]._flatten(SHARD)
        yield Ranks(place=place, layout=layout, device=device, mesh=mesh)
    finally:
        dist.destroy_process_group()


def _set_diagnostics() -> None:
    """What torch should leave behind when a collective hangs; only where the user has not said otherwise."""
    for name, value in {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }.items():
        os.environ.setdefault(name, value)
