"""Files of lengths: one whole number of tokens a line."""

from pathlib import Path

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.spec.errors import DataError

LIMIT = 10**12
"""Tokens above which a number is no length."""


def read_lengths(path: Path) -> tuple[IntArray, int]:
    """[documents] lengths of at least 1, in the order of the file, and how many lines said 0.

    Empty lines count for nothing. Raises DataError with the first line that is no whole number of tokens, and for a
    file that is missing, empty, or no text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: no text; a file of lengths has one whole number of tokens a line") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    lines = text.split("\n")
    try:
        lengths = np.array([line for line in lines if line and not line.isspace()], dtype=np.int64)
    except (ValueError, OverflowError):
        lengths = None
    if lengths is None or (len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= LIMIT):
        raise DataError(first_mistake(path, lines))
    if not len(lengths):
        raise DataError(f"{path}: no lengths in it; wanted one whole number of tokens a line")
    if not lengths.any():
        raise DataError(f"{path}: every document in it is empty, {len(lengths):,} lines of 0; wanted lengths in tokens")
    return lengths[lengths > 0], int((lengths == 0).sum())


def first_mistake(path: Path, lines: list[str]) -> str:
    for number, line in enumerate(lines, start=1):
        word = line.strip()
        if word and not (word.isascii() and word.isdigit() and int(word) <= LIMIT):
            return f"{path}:{number}: got {word[:40]!r}; wanted a whole number of tokens, such as 812"
    return f"{path}: not one whole number of tokens a line"


def line_of(path: Path, document: int) -> int:
    """Line, counted from 1, of a document of `read_lengths`."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    counted = [number for number, line in enumerate(lines, start=1) if line.strip() and int(line) > 0]
    return counted[document]
