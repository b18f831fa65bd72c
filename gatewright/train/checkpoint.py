"""Checkpoints: a folder that is complete when its manifest says so, and is never seen half-written.

    checkpoints/
        step-00000100/
            adapter/            PEFT's own format            (in full fine-tuning the weights are in state.safetensors)
            state.safetensors   optimizer and RNG            (one file a rank: state-00002-of-00004.safetensors)
            state.json          step, counters, learning rate
            manifest.json       name, size and sha256 of every file; written last
        .partial-step-00000200/ being written, or left by a kill: never read, removed at the next start

A save writes into the hidden folder, syncs every file to disk, writes the manifest, and renames the folder.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from gatewright.parallel.ranks import Ranks, alone
from gatewright.spec.errors import CheckpointError

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    bytes: int


def save(root: Path, *, step: int, write: Callable[[Path], None], ranks: Ranks | None = None) -> Checkpoint:
    """Writes a checkpoint of `step` under `root`; `write` puts its files into the folder it is given.

    With `ranks` each of them calls this, writes its own files, and returns or raises with the others. Raises
    CheckpointError when the disk refuses (full, read-only); what was complete before stays as it was.
    """
    final = root / f"step-{step:08d}"
    partial = root / f"{PARTIAL}{final.name}"
    ranks = ranks or alone(torch.device("cpu"))
    fault, files = _make_room(partial) if ranks.first else None, []
    ranks.wait()
    try:
        if fault is None:
            write(partial)
    except (OSError, SafetensorError) as error:
        fault = _why(error)
    ranks.wait()  # before anyone looks at the folder: files being written have passing names
    try:
        files = _describe(partial, rank=ranks.rank) if fault is None else []
    except OSError as error:
        fault = _why(error)
    told = ranks.collect((fault, files))
    faults = [f"rank {rank}: {text}" if ranks.size > 1 else text for rank, (text, _) in enumerate(told) if text]
    files = [entry for _, described in told for entry in described]
    if ranks.first and not faults:
        faults = _complete(partial, final, step=step, files=files)
    faults = ranks.tell(faults)
    if faults:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        raise CheckpointError(
            f"{final}: not saved ({'; '.join(faults)}); {free / 2**30:.2f} GiB are free there. Earlier checkpoints are "
            "untouched: make room and start the run again, it goes on from the newest"
        )
    return Checkpoint(step, final, sum(int(entry["bytes"]) for entry in files))


def complete(root: Path) -> list[Checkpoint]:
    """Checkpoints under `root` that have a manifest, oldest first; contents are not verified."""
    found = []
    for path in sorted(root.glob("step-*")):
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            found.append(Checkpoint(int(manifest["step"]), path, sum(int(f["bytes"]) for f in manifest["files"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def newest_sound(root: Path, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose files all have the size and hash of its manifest; tells `warn` of any passed over."""
    for leftover in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for checkpoint in reversed(complete(root)):
        fault = verify(checkpoint.path)
        if fault is None:
            return checkpoint
        warn(f"{checkpoint.path} is damaged ({fault}); falling back to the one before")
    return None


def verify(path: Path) -> str | None:
    """None for a sound checkpoint, otherwise what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this version reads {FORMAT}"
        for entry in manifest["files"]:
            file = path / entry["name"]
            if not file.is_file():
                return f"{entry['name']} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{entry['name']} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}"
            if _sha256(file) != entry["sha256"]:
                return f"{entry['name']} does not have the hash in the manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is unreadable: {error}"
    return None


def newest_up_to(root: Path, step: int) -> Checkpoint | None:
    """The newest complete checkpoint of at most `step` steps; contents are not verified."""
    return next((found for found in reversed(complete(root)) if found.step <= step), None)


def prune(root: Path, *, keep: int, spare: Collection[Path]) -> None:
    """Removes all but the newest `keep` complete checkpoints and those in `spare`."""
    spared = {path.resolve() for path in spare}
    for old in complete(root)[:-keep]:
        if old.path.resolve() not in spared:
            _remove(root, old.path)


def discard_after(root: Path, step: int) -> None:
    """Removes complete checkpoints of more than `step` steps: a rollback undid what they hold."""
    for undone in complete(root):
        if undone.step > step:
            _remove(root, undone.path)


def _remove(root: Path, path: Path) -> None:
    # Renamed first, so that a kill in the middle of the removal leaves nothing that looks complete.
    doomed = root / f"{PARTIAL}old-{path.name}"
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _make_room(partial: Path) -> str | None:
    """An empty folder to write into; the reason where there can be none."""
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        return _why(error)
    return None


def _complete(partial: Path, final: Path, *, step: int, files: list[dict[str, str | int]]) -> list[str]:
    """Writes the manifest and gives the folder its name; returns the reason where that fails."""
    try:
        manifest = partial / MANIFEST
        listed = sorted(files, key=lambda entry: str(entry["name"]))
        manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": listed}, indent=2), encoding="utf-8")
        _sync(manifest)
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        _sync(final.parent)
    except OSError as error:
        return [_why(error)]
    return []


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _describe(folder: Path, *, rank: int) -> list[dict[str, str | int]]:
    """Name, size and hash of the files that this rank has written, synced to disk."""
    files: list[dict[str, str | int]] = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and _writer(p) == rank):
        _sync(file)
        name = file.relative_to(folder).as_posix()
        files.append({"name": name, "bytes": file.stat().st_size, "sha256": _sha256(file)})
    for inner in (p for p in folder.rglob("*") if p.is_dir()):
        _sync(inner)
    return files


def _writer(file: Path) -> int:
    """The rank that writes a file, which the names of files of many ranks tell: name-RANK-of-RANKS."""
    match = re.search(r"-(\d+)-of-\d+$", file.stem)
    return int(match[1]) if match and file.stem.startswith("state") else 0


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
