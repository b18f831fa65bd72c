"""The record of a router's choices: assignments per block of consecutive tokens, and its file, routing.npz.

One row is one block of one document. R rows, L MoE layers, E experts.
"""

import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gatewright.spec.errors import DataError

FILE = "routing.npz"
"""Name of the record in a run's folder."""
VERSION = 1
BLOCK_TOKENS = 128

Ints = npt.NDArray[np.integer[Any]]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """What the router chose on some documents, in their order."""

    document: Ints
    """[R] number of the document; ascending."""
    block: Ints
    """[R] number of the block in its document, from 0 without gaps."""
    tokens: Ints
    """[R] tokens of the block: block_tokens, or less in the last one of a document."""
    counts: Ints
    """[R, L, E] assignments; each [E] sums to tokens × top_k."""
    layers: tuple[int, ...]
    """[L] layer index of each MoE layer."""
    top_k: int
    block_tokens: int

    @property
    def experts(self) -> int:
        return int(self.counts.shape[2])

    @property
    def documents(self) -> int:
        return len(np.unique(self.document))

    def loads(self) -> Ints:
        """[L, E] assignments over the whole record."""
        total: Ints = self.counts.sum(axis=0, dtype=np.int64)
        return total

    def whole_blocks(self) -> list[Ints]:
        """[blocks, L, E] of each document, in order, without what is left over at its end; empty ones left out."""
        whole = self.tokens == self.block_tokens
        numbers, counts = self.document[whole], self.counts[whole]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        return [part for part in np.split(counts, starts[1:]) if len(part)]

    def whole_documents(self) -> tuple[Ints, Ints]:
        """[D] tokens and [D, L, E] assignments of each document, in order, its last tokens too."""
        starts = np.flatnonzero(np.diff(self.document, prepend=-1))
        return np.add.reduceat(self.tokens, starts), np.add.reduceat(self.counts, starts, dtype=np.int64)

    def only(self, documents: Ints) -> "RoutingRecord":
        """The rows of these documents."""
        kept = np.isin(self.document, documents)
        return replace(
            self,
            document=self.document[kept],
            block=self.block[kept],
            tokens=self.tokens[kept],
            counts=self.counts[kept],
        )


def write_record(record: RoutingRecord, path: Path) -> None:
    """Writes the file whole or not at all; counts in the smallest type that holds them."""
    partial = path.with_name(f".partial-{path.name}")
    smallest = np.min_scalar_type(int(record.counts.max(initial=0)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent}: cannot be made ({error.strerror})") from None
    try:
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                version=np.int64(VERSION),
                document=record.document.astype(np.int32),
                block=record.block.astype(np.int32),
                tokens=record.tokens.astype(np.int32),
                counts=record.counts.astype(smallest),
                layers=np.array(record.layers, np.int32),
                top_k=np.int64(record.top_k),
                block_tokens=np.int64(record.block_tokens),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written ({error.strerror})") from None


def read_record(path: Path) -> RoutingRecord:
    """Reads and checks a record. Raises DataError when it is missing, damaged, or does not add up."""
    try:
        # np.load leaves a path that holds no archive open, and takes other forms than an archive.
        with path.open("rb") as stream, zipfile.ZipFile(stream), np.load(stream, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `gatewright router measure RUN.yaml` writes one") from None
    except Exception as error:  # a damaged archive makes zipfile and numpy raise nearly anything
        raise DataError(f"{path}: not a readable routing record ({error}); measure again") from None
    wanted = {"version", "document", "block", "tokens", "counts", "layers", "top_k", "block_tokens"}
    if missing := sorted(wanted - set(found)):
        raise DataError(f"{path}: not a routing record, it lacks {', '.join(missing)}; measure again")
    if found["version"].shape != () or found["version"] != VERSION:
        raise DataError(f"{path}: format {found['version']}, this version reads {VERSION}; measure again")
    if wrong := _mismatch(found):
        raise DataError(f"{path}: {wrong}; measure again")
    return RoutingRecord(
        document=found["document"],
        block=found["block"],
        tokens=found["tokens"],
        counts=found["counts"].astype(np.int32),
        layers=tuple(int(layer) for layer in found["layers"]),
        top_k=int(found["top_k"]),
        block_tokens=int(found["block_tokens"]),
    )


def _mismatch(found: dict[str, Array]) -> str | None:
    """What does not add up in a record's arrays, in words."""
    if any(array.dtype.kind not in "iu" for array in found.values()):
        return "it holds something other than integers"
    counts, rows = found["counts"], found["counts"].shape[0] if found["counts"].ndim else 0
    if counts.ndim != 3 or 0 in counts.shape:
        return f"counts have shape {list(counts.shape)}, wanted [rows, layers, experts], none of them 0"
    for name, size in (("document", rows), ("block", rows), ("tokens", rows), ("layers", counts.shape[1])):
        if found[name].shape != (size,):
            return f"{name} has shape {list(found[name].shape)}, counts {list(counts.shape)}"
    if found["top_k"].shape != () or found["block_tokens"].shape != ():
        return "top_k and block_tokens are not single numbers"
    step = np.diff(found["document"])
    in_order = np.where(step == 0, np.diff(found["block"]) == 1, (step > 0) & (found["block"][1:] == 0))
    if found["block"][0] != 0 or not in_order.all():
        return "its blocks are not in order"
    if (found["tokens"] > found["block_tokens"]).any() or (found["tokens"] < 1).any():
        return f"a block has more than {int(found['block_tokens'])} tokens, or none"
    assigned = counts.sum(axis=2, dtype=np.int64)
    wanted = found["tokens"].astype(np.int64) * int(found["top_k"])
    off = np.argwhere(assigned != wanted[:, None])
    if (counts < 0).any() or len(off):
        row, layer = off[0] if len(off) else (0, 0)
        return f"row {row} has {assigned[row, layer]} assignments in a layer, its tokens make {wanted[row]}"
    return None
