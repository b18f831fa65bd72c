"""The collectives of a training step, and the time that this rank spends in them.

Between CPUs a collective returns when it is done: its time is that of the clock, waiting for slower ranks included.
Between GPUs it is queued, and the stream that computes stands still until it is done: its time is that between two
events on this stream. What runs beside the computation, as FSDP's gathers do on a GPU, is no wait and not counted.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

EventPair = tuple[torch.cuda.Event, torch.cuda.Event]


class Meter:
    """Time in collectives since it was last read."""

    def __init__(self) -> None:
        self._clock_s = 0.0
        self._inside = False
        self._queued: list[EventPair] = []
        self._free: list[EventPair] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Counts the collective of the block, on tensors of this device; one within another counts once."""
        if self._inside:
            yield
            return
        self._inside, began = True, time.perf_counter()
        pair = self._pair() if device.type == "cuda" else None
        if pair:
            pair[0].record()
        try:
            yield
        finally:
            self._inside = False
            if pair:
                pair[1].record()
                self._queued.append(pair)
            else:
                self._clock_s += time.perf_counter() - began

    def take_s(self) -> float:
        """Seconds since the last call; waits for what a GPU has still to do of it."""
        for _, done in self._queued:
            done.synchronize()
        seconds = self._clock_s + sum(begun.elapsed_time(done) for begun, done in self._queued) / 1000
        self._free += self._queued
        self._clock_s, self._queued = 0.0, []
        return seconds

    def _pair(self) -> EventPair:
        if self._free:
            return self._free.pop()
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


METER = Meter()
"""Of this process, which is one rank."""


def all_reduce(values: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """The sum over the ranks of the group, in place."""
    with METER.on(values.device):
        dist.all_reduce(values, group=group)


def reduce_scatter(total: Tensor, values: Tensor, *, group: dist.ProcessGroup) -> None:
    """Into `total`, this rank's part of the sum of `values`."""
    with METER.on(values.device):
        dist.reduce_scatter_single(total, values, group=group)


def all_gather(every: Tensor, mine: Tensor, *, group: dist.ProcessGroup) -> None:
    """Into `every`, the values of each rank, by rank."""
    with METER.on(mine.device):
        dist.all_gather_single(every, mine, group=group)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    received_counts: Sequence[int] | None = None,
    sent_counts: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> None:
    """Rows of `sent` to each rank of the group, so many each; None: equally many."""
    counts = [None if given is None else list(given) for given in (received_counts, sent_counts)]
    with METER.on(sent.device):
        dist.all_to_all_single(received, sent, *counts, group=group)


def wait(works: Sequence[dist.Work], device: torch.device) -> None:
    """Returns when what was begun is done."""
    with METER.on(device):
        for work in works:
            work.wait()


def count_fsdp(module: FSDPModule) -> None:
    """Has the module's own gathers and reductions counted, between CPUs."""
    module.set_custom_all_gather(_AllGather())
    module.set_custom_reduce_scatter(_ReduceScatter())


class _AllGather(DefaultAllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with METER.on(input_tensor.device):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        with METER.on(input_tensor.device):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
