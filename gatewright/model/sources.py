"""A checkpoint's tensors as they lie in its files: plain floats, FP8 with scales, MXFP4 blocks; read one at a time."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gatewright.model.fp8 import CODE_TYPES, Fp8Weight, fp8_weight
from gatewright.spec.errors import ModelError

FLOATS = ("F64", "F32", "F16", "BF16")
SCALE_OF_INPUTS = ("input_scale", "activation_scale")
"""What an inference engine scales activations by; training has no use for it."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """What config.json says of a checkpoint in few bits."""

    kind: Literal["fp8", "mxfp4"]
    method: str
    """quant_method."""
    block: tuple[int, int] | None = None
    """FP8: output and input features that share a scale; None: the scale's own shape tells (a row, or a tensor)."""


def read_format(config: PretrainedConfig, *, source: str) -> StoredFormat | None:
    """The format of a checkpoint; None for plain floats. Raises ModelError for one that we do not read."""
    values = config.to_dict()
    stated = values.get("quantization_config") or (values.get("text_config") or {}).get("quantization_config")
    if not stated:
        return None
    method = str(stated.get("quant_method"))
    if method == "fp8":
        block = stated.get("weight_block_size")
        return StoredFormat("fp8", method, None if block is None else (int(block[0]), int(block[1])))
    if method in ("fbgemm_fp8", "mxfp4"):
        return StoredFormat("mxfp4" if method == "mxfp4" else "fp8", method)
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
        if weights and all((w.get("type"), w.get("num_bits")) == ("float", 8) for w in weights):
            blocks = [w["block_structure"] for w in weights if w.get("block_structure")]
            return StoredFormat("fp8", method, (int(blocks[0][0]), int(blocks[0][1])) if blocks else None)
        method = f"compressed-tensors, {stated.get('format')}"
    raise ModelError(
        f"{source}: its weights are quantised already ({method}); as a base for training we read plain floats, FP8 and "
        "MXFP4. Point model.path at the model's unquantised or FP8 release; method.quantize: nf4 makes it small at load"
    )


class Shards:
    """The tensors of a folder's safetensors files, read on demand into memory of their own (no mapped pages)."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self.place: dict[str, Any] = {}
        for file in files:
            handle = safe_open(folder / file, framework="pt", backend="pread")
            self.place |= dict.fromkeys(handle.keys(), handle)

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one entry along its first axis."""
        handle = self.place[name]
        value: Tensor = handle.get_tensor(name) if row is None else handle.get_slice(name)[row]
        return value

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self.place[name].get_slice(name).get_shape()
        return shape

    def kind(self, name: str) -> str:
        """Type as safetensors names it: BF16, F8_E4M3, …"""
        return str(self.place[name].get_slice(name).get_dtype())


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in plain floats (or integers, where the architecture has such)."""

    shards: Shards
    name: str

    @property
    def shape(self) -> list[int]:
        return self.shards.shape(self.name)

    @property
    def small_bytes(self) -> int:
        """Bytes of 4- and 8-bit codes in the file."""
        return 0

    def read(self, dtype: torch.dtype, row: int | None = None) -> Tensor:
        """The tensor, or one entry along its first axis: as stored, or in `dtype` from few bits."""
        return self.shards.read(self.name, row)


@dataclass(frozen=True, slots=True)
class Fp8Source(Source):
    """A tensor in FP8, and the name of its scale."""

    scale: str
    block: tuple[int, int] | None

    @property
    def small_bytes(self) -> int:
        return math.prod(self.shape)

    def weight(self, row: int | None = None) -> Fp8Weight:
        """As the file holds it."""
        codes, scale = self.shards.read(self.name, row), self.shards.read(self.scale, row)
        return fp8_weight(codes, scale, block=self.block, name=self.name)

    def read(self, dtype: torch.dtype, row: int | None = None) -> Tensor:
        return self.weight(row).dense(dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Source(Source):
    """An expert stack as gpt-oss is published: NAME_blocks [E, N, K/32, 16], two codes a byte, and NAME_scales."""

    @property
    def shape(self) -> list[int]:
        experts, outputs, groups, packed = self.shards.shape(f"{self.name}_blocks")
        return [experts, groups * packed * 2, outputs]

    @property
    def small_bytes(self) -> int:
        return math.prod(self.shards.shape(f"{self.name}_blocks"))

    def read(self, dtype: torch.dtype, row: int | None = None) -> Tensor:
        """[E, K, N], as the architecture holds its experts; or one expert."""
        blocks, scales = (self.shards.read(f"{self.name}_{part}", row) for part in ("blocks", "scales"))
        if row is not None:
            blocks, scales = blocks[None], scales[None]
        dense: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        return dense if row is None else dense[0]


def sources_of(shards: Shards, form: StoredFormat | None) -> dict[str, Source]:
    """The checkpoint's tensors by name, with what scales them. Raises ModelError for FP8 without a scale."""
    if form is None:
        return {name: Source(shards, name) for name in shards.place}
    if form.kind == "mxfp4":
        stacks = {name.removesuffix("_blocks") for name in shards.place if name.endswith("_blocks")}
        packed = {f"{name}_{part}" for name in stacks for part in ("blocks", "scales")}
        plain = {name: Source(shards, name) for name in shards.place if name not in packed}
        return plain | {name: Mxfp4Source(shards, name) for name in stacks}
    scales = {name: _scale_of(name, shards) for name in shards.place if shards.kind(name) in CODE_TYPES}
    extra = {*scales.values(), *(name for name in shards.place if name.endswith(SCALE_OF_INPUTS))}
    plain = {name: Source(shards, name) for name in shards.place if name not in extra | scales.keys()}
    return plain | {name: Fp8Source(shards, name, scale, form.block) for name, scale in scales.items()}


def _scale_of(name: str, shards: Shards) -> str:
    candidates = (f"{name}_scale_inv", f"{name}_scale", re.sub(r"weight$", "scale", name))
    for scale in candidates:
        if scale != name and scale in shards.place:
            return scale
    raise ModelError(f"{shards.folder}: {name} is FP8 but has no scale beside it ({', '.join(candidates)})")
