"""Tensors of a checkpoint in pieces: each rank writes its own, and any number of ranks reads what it needs of them.

    state.safetensors                         of one process: every tensor whole
    state-00002-of-00004.safetensors          of rank 2 of 4: whole tensors, and runs of elements of larger ones

Runs of elements are stored flat, one after the other, and the file's header says which, and of what tensor:
{"name": {"shape": […], "runs": [[begin, end], …]}}.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gatewright.parallel.pieces import Part
from gatewright.spec.errors import CheckpointError

_FILE = re.compile(r"state(?:-(\d+)-of-(\d+))?\.safetensors")


def file_name(rank: int, ranks: int) -> str:
    return "state.safetensors" if ranks == 1 else f"state-{rank:05d}-of-{ranks:05d}.safetensors"


def write_pieces(
    folder: Path, tensors: Mapping[str, Tensor], *, parts: Mapping[str, Part], rank: int, ranks: int
) -> Path:
    """Writes this rank's file, and returns its path. `parts`: what a tensor is of another one; the others are whole."""
    header = {key: {"shape": part.shape, "runs": part.runs} for key, part in parts.items() if not part.whole}
    flat = {key: tensor.reshape(-1) if key in header else tensor for key, tensor in tensors.items()}
    # One entry: with several, safetensors writes them in any order, and equal states would not be equal files.
    path = folder / file_name(rank, ranks)
    save_file(flat, path, {"pieces": json.dumps(header, sort_keys=True)})
    return path


class SavedState:
    """The state files of a checkpoint, read piece by piece."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where the files do not belong together."""
        found = {path: _FILE.fullmatch(path.name) for path in sorted(folder.glob("state*.safetensors"))}
        self.files = {int(match[1] or 0): path for path, match in found.items() if match}
        sizes = {int(match[2] or 1) for match in found.values() if match}
        if len(sizes) != 1 or set(self.files) != set(range(*sizes)):
            names = ", ".join(path.name for path in found) or "none"
            raise CheckpointError(f"{folder}: its state files are not those of one run, or not all of them: {names}")
        [self.ranks] = sizes
        self.folder = folder
        # Tensor name -> (rank whose file has it, what part of it)
        self._places: dict[str, list[tuple[int, Part]]] = {}
        for rank, path in self.files.items():
            with _open(path) as file:
                header = json.loads((file.metadata() or {}).get("pieces", "{}"))
                for key in file.keys():  # noqa: SIM118
                    if key in header:
                        part = Part(tuple(header[key]["shape"]), [(begin, end) for begin, end in header[key]["runs"]])
                    else:
                        part = _whole(tuple(file.get_slice(key).get_shape()))
                    self._places.setdefault(key, []).append((rank, part))

    def keys(self, prefix: str) -> list[str]:
        """What follows the prefix in the names that begin with it."""
        return [name.removeprefix(prefix) for name in self._places if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._places[name][0][1].shape

    def common(self, prefix: str) -> dict[str, Tensor]:
        """Whole tensors by name."""
        return {name: self.whole(name) for name in self._places if name.startswith(prefix)}

    def of_rank(self, rank: int, prefix: str) -> dict[str, Tensor]:
        """What one rank saved for itself."""
        if rank not in self.files:
            return {}
        with _open(self.files[rank]) as file:
            return {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118

    def whole(self, name: str) -> Tensor:
        """A tensor, put together from its pieces."""
        shape = self.shape(name)
        return self.read(name, _whole(shape)).view(shape)

    def read(self, name: str, part: Part) -> Tensor:
        """These elements of a tensor, flat; a tensor that is one number, as it is.

        Raises CheckpointError where the tensor has another shape, or some of its elements are in no file.
        """
        places = self._places.get(name)
        if places is None:
            raise CheckpointError(f"{self.folder}: {name} is not in its state files")
        rank, first = places[0]
        if first.shape == ():
            return self.of_rank(rank, name)[name]
        if first.shape != part.shape:
            raise CheckpointError(f"{self.folder}: {name} has the shape {first.shape}, this run's weight {part.shape}")
        result, covered = torch.empty(0), 0
        for rank, saved in places:
            with _open(self.files[rank]) as file:
                stored = file.get_slice(name)
                if not len(result):
                    result = torch.empty(part.elements, dtype=_elements(stored, 0, 0).dtype)
                for at, begin, elements in _overlaps(part.runs, saved.runs):
                    result[at : at + elements] = _elements(stored, begin, begin + elements)
                    covered += elements
        # Ranks write disjoint pieces, so that what is covered can be counted.
        if covered != part.elements:
            raise CheckpointError(
                f"{self.folder}: {covered:,} of {part.elements:,} elements of {name} are in its state files"
            )
        return result


def _whole(shape: tuple[int, ...]) -> Part:
    return Part(shape, [(0, prod(shape))])


def _overlaps(wanted: Sequence[tuple[int, int]], stored: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(place among the wanted elements, place among the stored ones, how many) of each run of elements in both."""
    at = 0
    for begin, end in wanted:
        place = 0
        for first, last in stored:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield at + low - begin, place + low - first, high - low
            place += last - first
        at += end - begin


def _elements(stored: Any, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of a slice of a file, flat; only the rows that hold them are read."""
    row = prod(stored.get_shape()[1:]) or 1
    top, bottom = begin // row, -(-end // row)
    return stored[top:bottom].reshape(-1)[begin - top * row : end - top * row]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
