"""Checkpoints: a folder that is complete when its manifest says so, and is never seen half-written.

    checkpoints/
        step-00000100/
            adapter/            PEFT's own format            (in full fine-tuning the weights are in state.safetensors)
            state.safetensors   optimizer and RNG            (one file a rank: state-00002-of-00004.safetensors)
            state.json          step, counters, learning rate
            manifest.json       name, size and sha256 of every file; written last
        .partial-step-00000200/ being written, or left by a kill: never read, removed at the next start

A save (save.py) writes into the hidden folder, syncs every file to disk, writes the manifest, and renames the folder.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    bytes: int


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
            if sha256(file) != entry["sha256"]:
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


def sha256(file: Path) -> str:
    """Of the file's content, in hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
