"""Safetensors written tensor by tensor: the header first, since shapes are known, then the data as they come.

The library writes a file from tensors that are all in memory. A merge has one at a time. A shard is written under
another name and renamed when it is whole and on disk, so a file with its own name is complete; a later attempt with the
same plan keeps it.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 10**9
PARTIAL = ".partial"

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}
_TYPES |= {torch.uint8: "U8", torch.bool: "BOOL", torch.float64: "F64"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One file and its tensors, in the order they are written."""

    name: str
    tensors: Mapping[str, Planned]

    def is_complete(self, folder: Path) -> bool:
        """Whether the file is there: it has its name only when it is whole."""
        file = folder / self.name
        return file.is_file() and file.stat().st_size == len(self.header()) + self.data_bytes

    @property
    def data_bytes(self) -> int:
        return sum(planned.bytes for planned in self.tensors.values())

    def header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, planned in self.tensors.items():
            entries[name] = {
                "dtype": _TYPES[planned.dtype],
                "shape": list(planned.shape),
                "data_offsets": [at, at + planned.bytes],
            }
            at += planned.bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_shards(tensors: Mapping[str, Planned], *, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """The files: tensors in their order, a new file before one that would make it larger than `shard_bytes`."""
    groups: list[dict[str, Planned]] = [{}]
    size = 0
    for name, planned in tensors.items():
        if groups[-1] and size + planned.bytes > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = planned
        size += planned.bytes
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    return [Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, start=1)]


def write_shard(folder: Path, shard: Shard, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Writes the file from tensors that come in the shard's order. Raises OSError when the disk refuses."""
    partial = folder / f"{shard.name}{PARTIAL}"
    wanted = iter(shard.tensors.items())
    with partial.open("wb") as file:
        file.write(shard.header())
        for name, tensor in tensors:
            planned_name, planned = next(wanted)
            assert (name, tuple(tensor.shape), tensor.dtype) == (planned_name, planned.shape, planned.dtype), name
            # numpy knows no bfloat16: the bytes go out as they are.
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        assert next(wanted, None) is None, "tensors are missing"
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, folder / shard.name)


def write_index(folder: Path, shards: list[Shard]) -> None:
    """The index that readers of several files need; none for a single one."""
    if len(shards) == 1:
        return
    content = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
    }
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
