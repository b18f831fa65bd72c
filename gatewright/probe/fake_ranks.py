"""One rank of many, alone in its process: groups without other members, and a routing that is assumed.

Collectives of torch's fake process group return at once, so a layout's buffers and exchanges are made as they are among
real ranks, and nothing is sent. How many rows an expert-parallel rank receives is the one size that other ranks decide.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools import fake_collectives  # noqa: F401  tells fake tensors what a collective returns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from gatewright.model.experts import Rows, find_experts
from gatewright.parallel.dispatch import Dispatch, Route
from gatewright.parallel.layout import Layout
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import SHARD, Ranks, alone
from gatewright.spec.errors import RunFileError

CPU = torch.device("cpu")


@contextmanager
def first_of(layout: Layout) -> Iterator[Ranks]:
    """The first rank of a layout, for the block. Raises RunFileError inside a process group."""
    if layout.ranks == 1:
        yield alone(CPU)
        return
    if dist.is_initialized():
        raise RunFileError("rehearsal: this process is one of several ranks; rehearse in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        yield Ranks(
            place=Place(rank=0, size=layout.ranks, local_rank=0, address="localhost", port=0),
            layout=layout,
            device=CPU,
            mesh=init_device_mesh("cpu", (layout.copies, layout.edp, layout.ep), mesh_dim_names=("copy", "edp", "ep")),
            dense=init_device_mesh("cpu", (layout.copies, layout.shard), mesh_dim_names=("copy", SHARD)),
        )
    finally:
        dist.destroy_process_group()
        # torch keeps what it worked out for a mesh by its shape, and would hand these groups to the next one like it.
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()


class AssumedDispatch(Dispatch):
    """Sends a rank's rows to all ranks alike, and receives `load` times as many as it would in perfect balance."""

    def __init__(self, group: dist.ProcessGroup, load: float) -> None:
        super().__init__(group)
        self.load = load

    def route(self, rows: Rows) -> tuple[Route, Tensor]:
        """As in balance, with `load`; only the numbers of rows that come for each expert stay unknown."""
        sent = len(rows.order_S)
        received = round(sent * self.load)
        received_GL = rows.ends_E.new_empty(self.ranks, len(rows.ends_E) // self.ranks, dtype=torch.int64)
        return Route(_evenly(sent, self.ranks), _evenly(received, self.ranks), self.group), received_GL


def assume_routing(model: PreTrainedModel, *, load: float) -> None:
    """Puts an assumed exchange where `settle` has put the real one."""
    for module in find_experts(model).values():
        module.gatewright_dispatch = AssumedDispatch(module.gatewright_dispatch.group, load)


def _evenly(rows: int, ranks: int) -> list[int]:
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
