"""Live bytes of a step: every storage an operation makes is counted from its first use to its end, fake or real."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp  # registers torch.ops.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from gatewright.model.head import decoder
from gatewright.model.quantized import QuantizedWeight
from gatewright.probe.fake import WRAPPERS
from gatewright.spec.rehearsal import PhaseName

BLOCK_BYTES = 512
"""The CUDA caching allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""

Segment = tuple[PhaseName, int]
"""A phase, and the decoder block it is in: -1 before the first block of that phase."""


@dataclass(slots=True)
class Peak:
    """The largest live bytes within one segment."""

    bytes: int = 0
    operator: str = ""
    by_birth: Counter[PhaseName] = field(default_factory=Counter)
    """What is alive, by the phase that made it."""


class LiveBytes(TorchDispatchMode):
    """Counts storages while the step runs, and keeps the peak of each segment.

    Phases are told from what happens, so the step under observation needs no marks: the base model's forward begins
    "forward" and ends in "loss"; work inside the autograd engine is "backward"; what follows it is "step".
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.resident_bytes = 0
        self.peaks: dict[Segment, Peak] = {}
        self._phase: PhaseName = "load"
        self._block = -1
        self._by_birth: Counter[PhaseName] = Counter()
        self._live: dict[int, tuple[weakref.ref[Any], int, PhaseName]] = {}
        self._resized: set[int] = set()
        """Storages that FSDP empties and fills again without an operation that would tell."""

    def watch(self, model: PreTrainedModel, blocks: nn.ModuleList) -> None:
        """Counts what the model holds as loaded, and hooks its base model and blocks to tell phases and blocks."""
        for tensor in [*model.parameters(), *model.buffers()]:
            for part in held_tensors(tensor):
                self.add(part, "weights and adapters")
        self.peaks["load", -1].operator = "weights and adapters"
        self._phase = "step"  # whatever comes before the first forward pass is forgotten with the first step
        decoder(model).register_forward_pre_hook(lambda *_: self._enter("forward"), prepend=True)  # before FSDP's
        decoder(model).register_forward_hook(lambda *_: self._enter("loss"))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self._enter_block(index), prepend=True)
            block.register_forward_hook(lambda _, __, output, index=index: self._await_gradient(output, index))

    def begin_step(self) -> None:
        """Forgets the peaks of the step before, so that those of the last step stay. What loading took is kept."""
        self.peaks = {segment: peak for segment, peak in self.peaks.items() if segment[0] == "load"}
        self.resident_bytes = 0

    def add(self, tensor: Tensor, operator: str) -> None:
        """Counts the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live:
            return
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), rounded(storage), self._phase)
        self._grow(rounded(storage), tensor, operator)

    def _grow(self, size: int, tensor: Tensor, operator: str) -> None:
        self.bytes += size
        self._by_birth[self._phase] += size
        peak = self.peaks.setdefault((self._phase, self._block), Peak())
        if self.bytes > peak.bytes:
            shape = ", ".join(map(str, tensor.shape))
            peak.bytes, peak.operator = self.bytes, f"{operator} -> {str(tensor.dtype).removeprefix('torch.')}[{shape}]"
            peak.by_birth = self._by_birth.copy()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:  # every look at a fake tensor's device comes by here
            return func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:
            if self._phase != "backward":
                self._enter("backward")
        elif self._phase == "backward":
            self._enter("step")
        self._drop_emptied()
        if func is torch.ops.fsdp.split_with_sizes_copy.default and kwargs:
            self._fill(kwargs["out"])
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf, str(func))
        return result

    def _fill(self, gathered: list[Tensor]) -> None:
        """FSDP writes gathered weights into storages it has just enlarged."""
        for tensor in gathered:
            key = id(tensor.untyped_storage())
            if key in self._resized:
                self.add(tensor, "weights gathered by FSDP")
            self._resized.add(key)

    def _drop_emptied(self) -> None:
        """Forgets the storages that FSDP has emptied since the last operation."""
        for key in self._resized & self._live.keys():
            storage = self._live[key][0]()
            if storage is not None and not storage.nbytes():
                self._forget(key)

    def _forget(self, key: int) -> None:
        _, size, birth = self._live.pop(key)
        self.bytes -= size
        self._by_birth[birth] -= size

    def _enter(self, phase: PhaseName) -> None:
        self._drop_emptied()
        if phase == "forward" and not self.resident_bytes:
            self.resident_bytes = self.bytes
        self._phase, self._block = phase, -1

    def _enter_block(self, index: int) -> None:
        self._block = index

    def _await_gradient(self, output: Any, index: int) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._enter_block(index))


def rounded(storage: torch.UntypedStorage) -> int:
    """What the allocator hands out for it, in bytes."""
    return -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES


def held_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors with storage behind one: itself, its part on this rank, or the parts of a weight in few bits."""
    if isinstance(tensor, DTensor):
        return [tensor.to_local().detach()]
    return list(tensor.parts.values()) if isinstance(tensor, QuantizedWeight) else [tensor]
