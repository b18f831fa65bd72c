"""The saving of a checkpoint: every rank's files by a thread of its own while steps go on, then its name by the first.

    training       copies its state | step | step | takes note of it, between two steps
    a thread                        | write, sync, hash |
    rank 0's                                            | manifest, rename, remove old ones |

The threads speak through the store that the ranks met at: a collective of theirs might get between those of a step.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from gatewright.parallel.ranks import Ranks, alone
from gatewright.spec.errors import CheckpointError
from gatewright.train.checkpoint import FORMAT, MANIFEST, PARTIAL, Checkpoint, sha256

LOOK_EVERY_S = 0.02

Write = Callable[[Path], Iterable[Path]]
"""Puts this rank's files into the folder it is given, and says which they are."""
Entry = dict[str, str | int]
"""Name, size and hash of one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save ended: with a complete checkpoint, or with faults."""

    faults: list[str]
    bytes: int
    write_s: float
    """From the first byte to the checkpoint's name, or to the fault."""


class Saving:
    """A checkpoint on its way. All ranks make it, ask for it and wait for it together."""

    def __init__(
        self,
        root: Path,
        *,
        step: int,
        write: Write,
        then: Callable[[], None] | None = None,
        ranks: Ranks | None = None,
        began: float | None = None,
    ) -> None:
        """Begins to write a checkpoint of `step` under `root`.

        `then`: what the first rank does once it is complete; `began`: when the steps stopped for it, if before now.
        """
        began = time.perf_counter() if began is None else began
        self.ranks = ranks or alone(torch.device("cpu"))
        self.step, self.final = step, root / f"step-{step:08d}"
        self.partial = root / f"{PARTIAL}{self.final.name}"
        self._write, self._then = write, then
        self._outcome: Outcome | None = None
        self.write_s = 0.0
        """How long the writing took, once it is complete."""
        self._naming, self._abandoned = threading.Lock(), threading.Event()
        if fault := self.ranks.tell(_make_room(self.partial) if self.ranks.first else None):
            self._refuse([fault])
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.copy_s = self.stall_s = time.perf_counter() - began
        """What the copy took, and all that the steps have waited for this save."""

    def poll(self) -> Checkpoint | None:
        """The complete checkpoint; None while it is being written.

        Raises CheckpointError, on all ranks, when the disk refused (full, read-only); what was complete before stays.
        """
        outcome = self.ranks.tell(self._outcome)
        if outcome is None:
            return None
        if outcome.faults:
            self._refuse(outcome.faults)
        self.write_s = outcome.write_s
        return Checkpoint(self.step, self.final, outcome.bytes)

    def wait(self) -> Checkpoint:
        """The same, when it is complete. A rank that dies meanwhile breaks the collective of the next look."""
        began = time.perf_counter()
        while (found := self.poll()) is None:
            self._thread.join(LOOK_EVERY_S)
        self.stall_s += time.perf_counter() - began
        return found

    def abandon(self) -> None:
        """Gives it up, after a failure: from now on it gets no name. Its files are removed at the next start."""
        with self._naming:
            self._abandoned.set()
        self._thread.join(timeout=10 * LOOK_EVERY_S)

    def _work(self) -> None:
        """The thread: this rank's files, and on the first rank all that makes a checkpoint of them."""
        began = time.perf_counter()
        fault, files = self._write_files()
        try:
            told = self._hear((fault, files))
            if told is None:
                return
            faults = [f"rank {rank}: {text}" if len(told) > 1 else text for rank, (text, _) in enumerate(told) if text]
            files = [entry for _, written in told for entry in written]
            faults = faults or self._complete(files)
        except Exception as error:
            # Without an outcome, all would wait for it for ever.
            faults, files = [f"{type(error).__name__}: {error}"], []
        if faults:
            shutil.rmtree(self.partial, ignore_errors=True)
        size = sum(int(entry["bytes"]) for entry in files)
        self._outcome = Outcome(faults=faults, bytes=size, write_s=time.perf_counter() - began)

    def _write_files(self) -> tuple[str | None, list[Entry]]:
        """(why not, or None; this rank's files, on disk)."""
        try:
            return None, _describe(self.partial, self._write(self.partial))
        except (OSError, SafetensorError) as error:
            return _why(error), []
        except Exception as error:
            # Whatever it is, the other ranks must hear of it.
            return f"{type(error).__name__}: {error}", []

    def _hear(self, mine: tuple[str | None, list[Entry]]) -> list[tuple[str | None, list[Entry]]] | None:
        """What each rank has written, by rank, when all have; None on all but the first, and once it is given up."""
        meeting, topic = self.ranks.meeting, f"saved/{self.step}"
        if meeting is None:
            return [mine]
        meeting.leave(topic, mine)
        while self.ranks.first and not self._abandoned.wait(LOOK_EVERY_S):
            if told := meeting.left(topic):
                return told
        return None

    def _complete(self, files: list[Entry]) -> list[str]:
        """Writes the manifest and gives the folder its name; returns the reason where that fails."""
        try:
            manifest = self.partial / MANIFEST
            listed = sorted(files, key=lambda entry: str(entry["name"]))
            text = json.dumps({"format": FORMAT, "step": self.step, "files": listed}, indent=2)
            manifest.write_text(text, encoding="utf-8")
            _sync(manifest)
            _sync(self.partial)
            with self._naming:
                if self._abandoned.is_set():
                    return ["given up"]
                if self.final.exists():
                    shutil.rmtree(self.final)
                os.rename(self.partial, self.final)
            _sync(self.final.parent)
            if self._then:
                self._then()
        except OSError as error:
            return [_why(error)]
        return []

    def _refuse(self, faults: list[str]) -> None:
        root = self.final.parent
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        raise CheckpointError(
            f"{self.final}: not saved ({'; '.join(faults)}); {free / 2**30:.2f} GiB are free there. Earlier "
            "checkpoints are untouched: make room and start the run again, it goes on from the newest"
        )


def save(root: Path, *, step: int, write: Write, ranks: Ranks | None = None) -> Checkpoint:
    """Writes a checkpoint and waits for it. Raises CheckpointError as `Saving.poll` does."""
    return Saving(root, step=step, write=write, ranks=ranks).wait()


def _make_room(partial: Path) -> str | None:
    """An empty folder to write into; the reason where there can be none."""
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        return _why(error)
    return None


def _describe(folder: Path, files: Iterable[Path]) -> list[Entry]:
    """Name, size and hash of these files, synced to disk."""
    entries: list[Entry] = []
    for file in files:
        _sync(file)
        name = file.relative_to(folder).as_posix()
        entries.append({"name": name, "bytes": file.stat().st_size, "sha256": sha256(file)})
    for inner in {folder / Path(str(entry["name"])).parent for entry in entries}:
        _sync(inner)
    return entries


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
