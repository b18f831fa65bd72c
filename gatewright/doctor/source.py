"""Sources of log text: files, folders, gzip and standard input, as chunks of bytes with one newline form."""

import codecs
import errno
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from gatewright.spec.errors import UserError

CHUNK_BYTES = 2**22
_GZIP = b"\x1f\x8b"
MAX_FILES = 256
MAX_ENTRIES = 20_000
"""Entries of a folder that are looked at; a folder of more is not a folder of logs."""
_LOG_SUFFIXES = {".log", ".out", ".err", ".txt", ".jsonl", ".gz", ".o", ".e", ""}
_NOT_LOGS = {"METADATA", "LICENSE", "README", "Makefile", "Dockerfile"}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1b\x08\x07")) + b"\x7f"
_BINARY_SHARE = 0.05


class LogError(UserError):
    """Nothing that can be read as a log was given."""


def find_logs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The files to read, folders searched, and notes on what was left out. Raises LogError where nothing is left."""
    files: list[Path] = []
    notes: list[str] = []
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno == errno.ENOENT and path.name.isascii() and path.name.isdecimal() and path.parent == Path():
                files += _of_job(path.name)
                continue
            raise LogError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise LogError(f"{str(path)!r} is not a path") from None
        if stat.S_ISDIR(mode):
            files += _in_folder(path, notes)
        else:
            files.append(path)
    if not files:
        raise LogError(f"{', '.join(map(str, paths))}: no log in it; wanted files such as *.log, *.out, *.err, *.jsonl")
    return files, notes


def _of_job(job: str) -> list[Path]:
    """The outputs of a SLURM job: files here, one folder below, or in a run's jobs whose names hold its number.
    Raises LogError."""
    whole = re.compile(rf"(?<!\d){job}(?!\d)")
    places = (f"*{job}*", f"*/*{job}*", f"runs/*/jobs/*/{job}*")
    found = {path for place in places for path in Path().glob(place) if path.is_file() and whole.search(path.name)}
    logs = sorted(path for path in found if path.suffix.lower() in _LOG_SUFFIXES)[:MAX_FILES]
    if not logs:
        raise LogError(
            f"no file here is the output of job {job} (looked for *{job}* here, one folder below, and in runs/*/jobs); "
            "give the file"
        )
    return logs


def _in_folder(folder: Path, notes: list[str]) -> list[Path]:
    """Logs below a folder: the newest, oldest of them first."""
    found: list[tuple[float, Path]] = []
    looked_at = 0
    for place, folders, names in os.walk(folder, onerror=None):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "checkpoint", "__pycache__")))
        for name in sorted(names):
            looked_at += 1
            if looked_at > MAX_ENTRIES:
                break
            path = Path(place, name)
            if path.suffix.lower() in _LOG_SUFFIXES and name not in _NOT_LOGS:
                try:
                    status = path.stat()
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode) and status.st_size:
                    found.append((status.st_mtime, path))
        if looked_at > MAX_ENTRIES:
            notes.append(
                f"{folder}: only the first {MAX_ENTRIES:,} files were looked at; name the logs, or a folder of them"
            )
            break
    found.sort()
    if len(found) > MAX_FILES:
        notes.append(f"{folder}: {len(found):,} logs; the newest {MAX_FILES} are read")
    return [path for _, path in found[-MAX_FILES:]]


def open_log(path: Path) -> BinaryIO:
    """The file as it lies there. Raises LogError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from None


def chunks(file: BinaryIO, *, name: str) -> Iterator[bytes]:
    """The bytes of a log in UTF-8, unpacked, at most CHUNK_BYTES at a time. Raises LogError where it is no text."""
    parts = _stored(file, name=name)
    first = next(parts, b"")
    parts = chain((first,), parts)
    if first.startswith(_GZIP):
        parts = _unpacked(parts)
        first = next(parts, b"")
        parts = chain((first,), parts)
    decoder = _wide_decoder(first)
    if decoder is None and is_binary(first[:65536]):
        raise LogError(f"{name} is a binary file, not a log")
    for part in parts:
        yield decoder.decode(part).encode("utf-8", "replace") if decoder else part


def _stored(file: BinaryIO, *, name: str) -> Iterator[bytes]:
    try:
        while part := file.read(CHUNK_BYTES):
            yield part
    except OSError as error:
        raise LogError(f"{name}: cannot be read: {error.strerror}") from None


def _unpacked(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The text of a gzip file of one or more members, as far as it goes if it is cut off or damaged."""
    unpacker = zlib.decompressobj(wbits=31)
    for part in parts:
        while part:
            try:
                text = unpacker.decompress(part, CHUNK_BYTES)
            except zlib.error:
                return
            if text:
                yield text
            part = unpacker.unconsumed_tail
            if unpacker.eof:
                part, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)


def _wide_decoder(raw: bytes) -> codecs.IncrementalDecoder | None:
    """A decoder for UTF-16, which PowerShell writes."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return codecs.getincrementaldecoder("utf-16")("replace")
    return None


def is_binary(sample: bytes) -> bool:
    """Whether bytes are something else than text in a superset of ASCII."""
    sample = sample.replace(b"\0", b"")  # a file system that lost a node leaves holes of zeros in a log
    return len(sample) - len(sample.translate(None, _CONTROL)) > _BINARY_SHARE * len(sample)
