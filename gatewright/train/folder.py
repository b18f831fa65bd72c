"""The run folder: named by the run, locked while a process works in it, and never taken over by another run."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gatewright.spec.errors import RunFileError
from gatewright.spec.read import dump_run, read_run
from gatewright.spec.run import Run
from gatewright.spec.same_run import changed


@contextmanager
def open_run_folder(run: Run, *, first: bool = True) -> Iterator[Path]:
    """Yields the run's folder, held under an exclusive lock, with the resolved run file in it.

    Of many ranks only the `first` locks and writes; the others must wait until it has. Raises RunFileError when it
    cannot be written, another process works in it, or it holds a run of other settings.
    """
    folder = run.folder
    if not first:
        yield folder
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFileError(
            f"run folder {folder}: cannot be written ({error.strerror}); choose another runs_dir"
        ) from None
    try:
        _take(lock, folder)
        _refuse_other_run(run, folder)
        _write_atomically(folder / "run.yaml", dump_run(run))
        yield folder
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "an unknown process"
        raise RunFileError(f"run folder {folder}: {holder} is working in it; wait for it, or stop it first") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _refuse_other_run(run: Run, folder: Path) -> None:
    saved = folder / "run.yaml"
    if not saved.exists():
        return
    differing = changed(read_run(saved), run)
    if differing and any((folder / "checkpoints").glob("step-*")):
        lines = "\n".join(f"  {field}: {then!r} then, {now!r} now" for field, then, now in differing)
        raise RunFileError(
            f"run folder {folder} has checkpoints of a run with other settings:\n{lines}\n"
            f"give this run another name, or set these back to go on with the old one"
        )


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
