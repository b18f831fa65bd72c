"""A folder of weights: what a model, an adapter or a trainer's checkpoint holds, from names, sizes and headers."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from gatewright.planner.weights import HEADER_LIMIT_BYTES, INDEX_LIMIT_BYTES, read_header
from gatewright.spec.errors import ModelError

MAX_ENTRIES = 20_000
"""Names of a folder that are looked at."""
MAX_JSON_BYTES = 64 * 2**20
MAX_READ_BYTES = 256 * 2**20
"""Of an adapter's tensors, to see whether they are all zero."""
INDICES = ("model.safetensors.index.json", "adapter_model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a safetensors header."""

    name: str
    dtype: str
    bytes: int
    shape: tuple[int, ...]
    file: str
    start: int
    """Of its data in the file."""


@dataclass(slots=True)
class Folder:
    """Everything the rules of GW9xx look at."""

    path: Path
    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the files at the top, by name; folders are there with size -1."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """What is wrong with a safetensors or JSON file, in words."""
    index: Mapping[str, Any] = field(default_factory=dict)
    """Tensor to file, by the index."""
    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    """Entries of the tokenizer's vocabulary, added tokens included."""
    whole: bool = True
    """False: it holds more than MAX_ENTRIES names."""

    @property
    def is_adapter(self) -> bool:
        return "adapter_config.json" in self.sizes

    @property
    def is_checkpoint(self) -> bool:
        return "trainer_state.json" in self.sizes

    @property
    def is_model(self) -> bool:
        return "config.json" in self.sizes and not self.is_adapter

    def named(self, start: str, end: str = "") -> list[str]:
        return sorted(name for name in self.sizes if name.startswith(start) and name.endswith(end))


def is_weights_folder(path: Path) -> bool:
    """A folder with a model's, an adapter's or a checkpoint's files."""
    marks = ("config.json", "adapter_config.json", "trainer_state.json", *INDICES, "model.safetensors")
    return isdir(path) and any(isfile(path / mark) for mark in marks)


def read_folder(path: Path, name: str) -> Folder:
    """Names, headers and small JSON files; no tensor is read."""
    folder = Folder(path, name)
    with os.scandir(path) as entries:
        held = list(islice(entries, MAX_ENTRIES + 1))
    folder.whole = len(held) <= MAX_ENTRIES
    for entry in held[:MAX_ENTRIES]:
        folder.sizes[entry.name] = entry.stat().st_size if entry.is_file() else -1
    folder.config = _json(folder, "config.json")
    folder.adapter = _json(folder, "adapter_config.json")
    folder.tokenizer = _json(folder, "tokenizer_config.json")
    folder.tokens = _vocabulary(_json(folder, "tokenizer.json"))
    for index in INDICES:
        weight_map = _json(folder, index, limit=INDEX_LIMIT_BYTES).get("weight_map")
        if isinstance(weight_map, dict):
            folder.index = weight_map
    for file in folder.named("", ".safetensors"):
        try:
            read_header(path / file)
            folder.tensors |= {tensor.name: tensor for tensor in _tensors(path / file)}
        except ModelError as error:
            folder.broken.append(str(error))
    return folder


def _json(folder: Folder, name: str, *, limit: int = MAX_JSON_BYTES) -> Mapping[str, Any]:
    if not 0 <= folder.sizes.get(name, -1) <= limit:
        return {}
    try:
        value = json.loads((folder.path / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        folder.broken.append(f"{folder.name}/{name} is not readable JSON: {str(error)[:80]}")
        return {}
    return value if isinstance(value, dict) else {}


def _vocabulary(tokenizer: Mapping[str, Any]) -> int | None:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list):
        return None
    added = tokenizer.get("added_tokens")
    items = added if isinstance(added, list) else []
    ids: list[int] = [item["id"] for item in items if isinstance(item, dict) and isinstance(item.get("id"), int)]
    return max([len(vocab), *(number + 1 for number in ids)])


def _tensors(file: Path) -> Iterator[Tensor]:
    """Entries of a header that `read_header` has checked."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, HEADER_LIMIT_BYTES)))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield Tensor(name, entry["dtype"], end - start, tuple(entry["shape"]), file.name, 8 + length + start)


def all_zero(folder: Folder, tensor: Tensor) -> bool:
    """Every byte of a tensor is zero (a B matrix that never took a step)."""
    left = tensor.bytes
    with (folder.path / tensor.file).open("rb") as stream:
        stream.seek(tensor.start)
        while left > 0:
            block = stream.read(min(left, 2**20))
            if not block or block.strip(b"\0"):
                return False
            left -= len(block)
    return True
