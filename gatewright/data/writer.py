"""Writes the files of a token store: into a folder beside its place, which it takes only when all is written."""

import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from gatewright.data.rows import Place
from gatewright.data.template import Document
from gatewright.spec.errors import DataError, RunFailed

FILES = ("tokens", "targets", "offsets", "counts", "lines")


class StoreWriter:
    """Appends documents to the binary files of one folder; a context manager that closes them."""

    def __init__(self, folder: Path, *, files: list[Path], vocab_size: int) -> None:
        """`files` are those that the documents will come from."""
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.documents = self.tokens = self.straddling_tokens = self.dropped_reasoning = 0
        self._numbers = {str(file): number for number, file in enumerate(files)}
        self._first_rows: dict[int, int] = {}
        self._open = ExitStack()
        self._files = {name: self._open.enter_context((folder / f"{name}.bin").open("wb")) for name in FILES}
        self._append("offsets", 0)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, document: Document, place: Place) -> None:
        """Appends one document."""
        self._first_rows.setdefault(self._numbers[place.file], self.documents)
        is_target = np.array(document.is_target, bool)
        self.documents += 1
        self.tokens += len(document.tokens)
        self.straddling_tokens += document.straddling_tokens
        self.dropped_reasoning += document.dropped_reasoning
        self._files["tokens"].write(np.array(document.tokens, self.dtype).tobytes())
        self._files["targets"].write(is_target.tobytes())
        self._append("offsets", self.tokens)
        self._append("counts", int(is_target[1:].sum()))
        self._append("lines", place.number)

    def finish(self, **facts: object) -> None:
        """Closes the files and writes store.json: the given facts and what was counted here."""
        self._open.close()
        counted = {
            "documents": self.documents,
            "tokens": self.tokens,
            "dtype": self.dtype.name,
            "straddling_tokens": self.straddling_tokens,
            "dropped_reasoning": self.dropped_reasoning,
            "first_rows": list(self._first_rows.items()),
        }
        (self.folder / "store.json").write_text(json.dumps(facts | counted, indent=1) + "\n")

    def _append(self, name: str, value: int) -> None:
        self._files[name].write(value.to_bytes(8, sys.byteorder, signed=True))


@contextmanager
def written_whole(place: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `place` at the end of the block, or is removed if the block fails.

    When another process has put a folder there meanwhile, that one stays. Raises DataError where nothing may be
    written, RunFailed when the disk is full.
    """
    partial = place.with_name(f".partial-{place.name}-{socket.gethostname()}-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(place)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        try:
            os.rename(partial, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"the disk of {place.parent} is full: tokens could not be written; free space there, or set runs_dir "
                "to a folder on another disk"
            ) from error
        raise DataError(
            f"tokens cannot be written to {place.parent}: {error.strerror}; set runs_dir to a folder you may write to"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_orphans(place: Path) -> None:
    """Removes what processes of this machine that were killed while writing `place` have left."""
    prefix = f".partial-{place.name}-{socket.gethostname()}-"
    for left in place.parent.iterdir():
        writer = left.name.removeprefix(prefix)
        if left.name.startswith(prefix) and writer.isdigit() and not _is_running(int(writer)):
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
