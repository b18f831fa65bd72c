"""Ranks: this process among the others, their groups, and the few sums they make together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gatewright.parallel.alive import CONNECTED
from gatewright.parallel.collectives import all_reduce
from gatewright.parallel.failure import fail_together
from gatewright.parallel.groups import GroupPool
from gatewright.parallel.layout import Layout
from gatewright.parallel.meeting import Meeting, meet
from gatewright.parallel.place import ALONE, Place
from gatewright.spec.errors import RunFileError

SHARD = "shard"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process and its groups. Alone, there is no process group, and every sum is the value itself."""

    place: Place
    layout: Layout
    device: torch.device
    meeting: Meeting | None = None
    """For what is said outside of collectives; None: alone."""
    mesh: DeviceMesh | None = None
    """Dimensions copy, edp, ep (layout.py), for experts; None: alone."""
    dense: DeviceMesh | None = None
    """Dimensions copy, shard = edp × ep, for everything else; None: alone."""
    pool: GroupPool | None = None
    """Aligned groups that share documents; None: no document is cut, or alone."""

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

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def part(self, name: str) -> DeviceMesh:
        """The sub-mesh of that name that this rank belongs to: copy, edp, ep or shard."""
        assert self.mesh is not None and self.dense is not None
        return self.dense[name] if name == SHARD else self.mesh[name]

    def with_copies(self, name: str) -> DeviceMesh:
        """The same, with the copies of the model as a first dimension where there are any."""
        assert self.mesh is not None and self.dense is not None
        if self.layout.copies == 1:
            return self.part(name)
        return self.dense if name == SHARD else self.mesh["copy", name]

    def position(self, name: str) -> int:
        """This rank's number within that sub-mesh; 0 alone."""
        return 0 if self.alone else self.part(name).get_local_rank()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on every rank, of a tensor on the CPU or the device; the tensor is overwritten."""
        if not self.alone:
            all_reduce(values)
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

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Lets the first rank through the block before the others; if it fails there, they fail."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def tell(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.alone:
            return value
        box = [value if self.first else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]

    def collect(self, value: T) -> list[T]:
        """The value of each rank, by rank, on every rank."""
        if self.alone:
            return [value]
        every: list[T | None] = [None] * self.size
        dist.all_gather_object(every, value)
        return every  # type: ignore[return-value]

    def mark(self, step: int) -> None:
        """Leaves word of the step this rank is in, for those who find it missing."""
        if self.meeting is not None:
            self.meeting.mark(step)

    def wait(self) -> None:
        """Returns when every rank has come here."""
        if not self.alone:
            self.sum(torch.zeros(()))


def alone(device: torch.device) -> Ranks:
    """One process on its own."""
    return Ranks(place=ALONE, layout=Layout(), device=device)


@contextmanager
def join_ranks(place: Place, layout: Layout, *, device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """Joins the process group for the block: NCCL or RCCL between GPUs, gloo between CPUs and for control.

    Whichever rank fails ends all of them (failure.py), from the moment they meet. A rank that does not come to a
    collective fails it on the others after `timeout_s`; one that dies while ranks connect, sooner (alive.py).
    """
    if place.size == 1:
        yield Ranks(place=place, layout=layout, device=device)
        return
    _set_diagnostics()
    on_gpu = device.type == "cuda"
    meeting = meet(place, timeout_s=timeout_s)
    with fail_together(meeting):
        meeting.wait_for_all(timeout_s=timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=meeting.own_connection(),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
        _refuse_difference(layout, place.size)
        sizes = (layout.copies, layout.edp, layout.ep)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copy", "edp", "ep"))
        dense = init_device_mesh(device.type, (layout.copies, layout.shard), mesh_dim_names=("copy", SHARD))
        pool = GroupPool(rank=place.rank, ranks=place.size, device=device) if layout.cuts else None
        meeting.count_in(CONNECTED)
        yield Ranks(place=place, layout=layout, device=device, meeting=meeting, mesh=mesh, dense=dense, pool=pool)
    # Not after a failure: other ranks may be gone, and taking leave of them would wait for them.
    dist.destroy_process_group()


def _refuse_difference(layout: Layout, size: int) -> None:
    """Raises RunFileError, on every rank, where ranks were started for different layouts: they would never meet."""
    every: list[Layout | None] = [None] * size
    dist.all_gather_object(every, layout)
    first, found = every[0], {item: rank for rank, item in reversed(list(enumerate(every))) if item}
    other = next((item for item in found if item != first), None)
    if first is not None and other is not None:
        raise RunFileError(
            f"parallel: rank 0 is to run {first.describe()}, rank {found[other]} {other.describe()}; the ranks read "
            "different run files, or have different GPUs, for which auto chooses differently. Write the layout into "
            "the run file"
        )


def _set_diagnostics() -> None:
    """What torch should leave behind when a collective hangs; only where the user has not said otherwise."""
    for name, value in {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }.items():
        os.environ.setdefault(name, value)
