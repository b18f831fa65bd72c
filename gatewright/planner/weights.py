"""Bytes of weights: exact, from the headers of safetensors files, or by formula for a checkpoint in a given format."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatewright.planner.architecture_config import read_json
from gatewright.planner.job import BYTES_PER_WEIGHT, Storage
from gatewright.planner.tensors_roles import role_of
from gatewright.spec.errors import ModelError
from gatewright.spec.shape import ROLES, ModelShape, TensorGroup, TensorRole

HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors format's own limit."""
INDEX_LIMIT_BYTES = 256 * 2**20
INDEX_NAME = "model.safetensors.index.json"

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """What a checkpoint holds, from its headers; no tensor was read."""

    path: Path
    files: int
    tensors: int
    bytes: int
    """Of the tensors, without headers."""
    bytes_by_dtype: dict[str, int]
    """safetensors' names: BF16, F8_E4M3, F8_E8M0, I8, U8 (packed 4-bit codes) …, largest first."""
    bytes_by_role: dict[TensorRole, int]
    """By tensor name, in the order of ROLES; scales count with the weights they scale."""


def read_weights(path: str | Path, *, layers: int | None = None) -> StoredWeights:
    """Exact bytes by dtype and role of a safetensors file, an index, or a folder of them.

    `layers`: the model's depth; blocks beyond it are MTP layers. Raises ModelError for a missing, cut off or
    malformed file; a header that promises more bytes than the file has means an unfinished download.
    """
    files = weight_files(Path(path))
    by_dtype: Counter[str] = Counter()
    by_role: Counter[TensorRole] = Counter()
    tensors = 0
    for file in files:
        for name, dtype, size in read_header(file):
            by_dtype[dtype] += size
            by_role[stored_role(name, layers=layers)] += size
            tensors += 1
    return StoredWeights(
        path=Path(path),
        files=len(files),
        tensors=tensors,
        bytes=sum(by_dtype.values()),
        bytes_by_dtype=dict(by_dtype.most_common()),
        bytes_by_role={role: by_role[role] for role in ROLES if by_role[role]},
    )


def stored_role(name: str, *, layers: int | None) -> TensorRole:
    """As `role_of`, with blocks beyond the model's depth under mtp."""
    head, found, tail = name.partition("layers.")
    index = tail.split(".", 1)[0]
    if found and layers is not None and index.isdecimal() and int(index) >= layers and "visual" not in head:
        return "mtp"
    return role_of(name)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files behind a path, in order of name."""
    if path.is_dir():
        index = path / INDEX_NAME
        if index.is_file():
            return indexed_files(index)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            pickled = any(path.glob("*.bin"))
            also = " (it holds pickled .bin weights, which are never read)" if pickled else ""
            raise ModelError(f"{path} holds no safetensors file{also}. Point at a folder with *.safetensors.")
        return files
    if not path.is_file():
        raise ModelError(f"{path} is neither a file nor a folder.")
    return indexed_files(path) if path.name.endswith(".index.json") else [path]


def indexed_files(index: Path) -> list[Path]:
    """Files an index names. Raises ModelError when some are missing."""
    weight_map = read_json(index, limit_bytes=INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map: it is not a safetensors index, or is cut off.")
    names = sorted({str(name) for name in weight_map.values()})
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} points outside its own folder; wanted plain file names in weight_map.")
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{index}: {len(missing)} of {len(files)} files are missing, first {missing[0]}. Fetch them.")
    return files


def read_header(file: Path) -> list[tuple[str, str, int]]:
    """(name, dtype, bytes) of each tensor in one safetensors file: 8 bytes of length, then JSON, then the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
                raise ModelError(
                    f"{file} is cut off or is no safetensors file: its header should have {length:,} bytes, "
                    f"the file has {size:,}. Fetch it again."
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} has a header that is not JSON ({error}). Fetch it again.") from None
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a header that is no JSON object. Fetch it again.")
    entries = [entry_of(file, name, value) for name, value in header.items() if name != "__metadata__"]
    promised = max((end for _, _, _, end in entries), default=0)
    if 8 + length + promised != size:
        raise ModelError(
            f"{file} is incomplete: its header promises {8 + length + promised:,} bytes, the file has {size:,}. "
            "Fetch it again."
        )
    return [(name, dtype, end - start) for name, dtype, start, end in entries]


def entry_of(file: Path, name: str, value: Any) -> tuple[str, str, int, int]:
    """Name, dtype, start and end of one header entry, checked against its shape."""
    try:
        dtype, shape, (start, end) = str(value["dtype"]), value["shape"], value["data_offsets"]
        elements = math.prod(shape)
        bits = DTYPE_BITS.get(dtype)
        sane = 0 <= start <= end and all(type(extent) is int and extent >= 0 for extent in shape)
        sane = sane and (bits is None or elements * bits == (end - start) * 8)
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        raise ModelError(f"{file}: the header entry of {name[:80]} is damaged. Fetch the file again.")
    return name, dtype, start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a checkpoint stores the matrices of blocks; embeddings, head, routers and norms stay in 16 bits."""

    text: str
    dense: Storage
    """Linear modules of attention, dense MLPs and shared experts."""
    experts: Storage
    """Routed experts."""
    plain_names: frozenset[str] = frozenset()
    """Linear modules that this format leaves in 16 bits."""


DEEPSEEK_PLAIN = frozenset(
    ("compressor.kv_proj", "compressor.gate_proj", "indexer.kv_proj", "indexer.gate_proj", "indexer.weights_proj")
)
FORMATS = {
    "bf16": Format(text="every tensor in 16 bits", dense="bf16", experts="bf16"),
    "fp8": Format(text="matrices of blocks in fp8, one fp32 scale a 128 × 128 block", dense="fp8", experts="fp8"),
    "fp8-mxfp4": Format(
        text="as DeepSeek-V4 is published: routed experts in fp4 with a scale every 32, other matrices in fp8",
        dense="fp8",
        experts="mxfp4",
        plain_names=DEEPSEEK_PLAIN,
    ),
    "mxfp4": Format(text="as gpt-oss is published: routed experts in mxfp4", dense="bf16", experts="mxfp4"),
    "nvfp4": Format(text="matrices of blocks in fp4, an fp8 scale every 16", dense="nvfp4", experts="nvfp4"),
    "int8": Format(text="matrices of blocks in 8-bit integers", dense="int8", experts="int8"),
    "int4": Format(text="GPTQ and AWQ: 4 bits, a scale and a zero every 128", dense="int4", experts="int4"),
    "nf4": Format(text="NF4 on every matrix of the blocks, experts included", dense="nf4", experts="nf4"),
    "nf4-linears": Format(
        text="NF4 on linear modules only: a plain bitsandbytes load leaves fused experts in bf16",
        dense="nf4",
        experts="bf16",
    ),
}


def native_format(shape: ModelShape) -> str:
    """Key of FORMATS that a published checkpoint of this shape is stored in: by family and quantization_config."""
    if shape.family == "deepseek_v4":
        return "fp8-mxfp4"
    return shape.storage or "bf16"


def checkpoint_bytes(shape: ModelShape, *, storage: Format, mtp: bool = True) -> dict[TensorRole, int]:
    """Bytes on disk by role, scales included; `mtp`: with the multi-token-prediction layers."""
    sizes: Counter[TensorRole] = Counter()
    for group in shape.groups:
        if mtp or group.role != "mtp":
            sizes[group.role] += round(group_bytes(group, storage=storage))
    return {role: sizes[role] for role in ROLES if sizes[role]}


def group_bytes(group: TensorGroup, *, storage: Format) -> float:
    """Bytes of one tensor group; hyper-connections are kept in fp32."""
    small = 0.0
    quantized = 0
    if group.role not in ("router", "head"):
        for linear in group.linears:
            fused = linear.copies > 1 and linear.name in ("gate_up_proj", "up_proj", "down_proj")
            if linear.module and linear.name not in storage.plain_names:
                small += linear.weights * BYTES_PER_WEIGHT[storage.experts if fused else storage.dense]
                quantized += linear.weights
    plain = BYTES_PER_WEIGHT["fp32" if group.role == "residual" else "bf16"]
    return small + (group.parameters - quantized) * plain


def four_bit_readings(shape: ModelShape) -> dict[str, int]:
    """Bytes behind the different things that people call `in 4 bits`, smallest first where experts dominate."""
    built, stored = shape.parameters, shape.checkpoint_parameters
    return {
        "4 bits a parameter, no scales": built // 2,
        "NF4 on every matrix of the blocks": total_bytes(shape, "nf4"),
        "0.6 bytes a parameter, MTP layers included (rule of thumb)": stored * 3 // 5,
        "NF4 on linear modules, fused experts left in bf16 (plain bitsandbytes load)": total_bytes(
            shape, "nf4-linears"
        ),
    }


def total_bytes(shape: ModelShape, key: str, *, mtp: bool = False) -> int:
    """Bytes of the whole model in one of FORMATS."""
    return sum(checkpoint_bytes(shape, storage=FORMATS[key], mtp=mtp).values())
