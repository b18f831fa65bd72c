"""The token store: a data file as flat binary files of tokens, written once, reused, and mapped into memory.

    tokens.bin     uint16 or uint32 [tokens]      every row's tokens, row after row
    targets.bin    bool [tokens]                  whether the model learns to write the token
    offsets.bin    int64 [rows + 1]               where each row begins in both
    counts.bin     int64 [rows]                   target tokens of each row, its first token aside
    lines.bin      int64 [rows]                   line or row number in its source file
    store.json                                    version, fingerprint, totals, and where each source file begins

Rows are kept whole: a limit on their length is a view (`TokenStore.limit`), so changing it costs nothing.
"""

import hashlib
import json
import re
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gatewright.data.documents import read_rows, source_files
from gatewright.data.rows import Place, Row
from gatewright.data.template import Renderer
from gatewright.data.view import MIN_TOKENS, DocumentView, Policy, limit_rows
from gatewright.data.writer import FILES, StoreWriter, written_whole
from gatewright.packing.arrays import IntArray
from gatewright.packing.lengths import percentile
from gatewright.spec.errors import DataError

STORE_VERSION = 1
ROWS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 1 << 21
"""Rows that are tokenised together: enough for all cores, few enough that long ones do not fill the memory."""
HASHED_AT_ONCE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """All rows of one source, as tokens on disk."""

    folder: Path
    fingerprint: str
    """sha256 of the source's content, the tokenizer, the template and this format's version."""
    source: str
    sources: list[tuple[str, int]]
    """Each source file, and the number of its first row in this store."""
    highest_token: int
    straddling_tokens: int
    """Tokens that begin in a prompt and end in the model's words; they are no targets."""
    dropped_reasoning: int
    """Turns, not last in their conversation, whose reasoning the chat template left out."""
    tokens_T: npt.NDArray[np.unsignedinteger[Any]] = field(repr=False)
    is_target_T: npt.NDArray[np.bool_] = field(repr=False)
    offsets_N1: IntArray = field(repr=False)
    target_counts_N: IntArray = field(repr=False)
    lines_N: IntArray = field(repr=False)

    def __len__(self) -> int:
        return len(self.target_counts_N)

    def place(self, row: int) -> Place:
        """Where a row stands in its source."""
        file, _ = self.sources[bisect_right([first for _, first in self.sources], row) - 1]
        return Place(file, int(self.lines_N[row]), is_line=not file.endswith((".parquet", ".arrow")))

    def limit(self, max_tokens: int | str, overlong: Literal["error"] | Policy) -> DocumentView:
        """The rows that have something to learn, none longer than `max_tokens`: a number, or a percentile like `p99`.

        Raises DataError when there is no such row, or a longer one and `overlong` is `error`.
        """
        lengths_N = np.diff(self.offsets_N1)
        rows = np.flatnonzero((lengths_N >= MIN_TOKENS) & (self.target_counts_N > 0))
        if not len(rows):
            raise DataError(self._nothing_to_learn())
        at_most = _at_most(max_tokens, lengths_N[rows])

        def view(policy: Policy) -> DocumentView:
            return limit_rows(
                rows_N=rows,
                starts_N=self.offsets_N1[rows],
                lengths_N=lengths_N[rows],
                target_counts_N=self.target_counts_N[rows],
                tokens_T=self.tokens_T,
                is_target_T=self.is_target_T,
                max_tokens=at_most,
                policy=policy,
                untrained=len(self) - len(rows),
            )

        if overlong != "error":
            limited = view(overlong)
            if not len(limited):
                raise DataError(f"{self.source}: nothing to learn is left at data.max_tokens = {max_tokens}; raise it")
            return limited
        longest = rows[lengths_N[rows].argmax()]
        if lengths_N[longest] > at_most:
            truncated, split, dropped = view("truncate"), view("split"), view("drop")
            meaning = "" if isinstance(max_tokens, int) else f" ({at_most:,} tokens)"
            raise DataError(
                f"{self.source}: {dropped.overlong_documents:,} of {len(rows):,} documents are longer than "
                f"data.max_tokens = {max_tokens}{meaning}; the longest has {lengths_N[longest]:,} tokens, at "
                f"{self.place(int(longest))}.\nRaise data.max_tokens (p100 keeps all), or choose data.overlong: "
                f"truncate loses {truncated.tokens_lost:,} tokens, split {split.tokens_lost:,} targets at the cuts, "
                f"drop {dropped.tokens_lost:,} tokens."
            )
        return view("truncate")

    def _nothing_to_learn(self) -> str:
        return (
            f"{self.source}: no token to learn in any of its {len(self):,} rows, so all labels are masked. A "
            "conversation needs an assistant message, a prompt its completion, a text at least two tokens"
        )


def _at_most(max_tokens: int | str, lengths_N: IntArray) -> int:
    if isinstance(max_tokens, int):
        return max_tokens
    percent = re.fullmatch(r"p(\d+(?:\.\d+)?)", max_tokens)
    if not percent or float(percent[1]) > 100:
        raise DataError(f"max_tokens is {max_tokens!r}; wanted a number of tokens, or a percentile such as p99")
    return percentile(lengths_N, float(percent[1]))


def build_store(
    source: Path, *, renderer: Renderer, root: Path, vocab_size: int, console: Console | None = None
) -> TokenStore:
    """The store of `source` below `root`: one that is there and was made of the same content, or a new one.

    While rows are rendered, a progress bar shows on `console` (default: stderr, where that is a terminal).

    Raises DataError for data that cannot be read or rendered, and for tokens that a model of `vocab_size` does not
    have; RunFailed when the disk is full. A failure leaves nothing behind.
    """
    files = source_files(source)
    with _progress(console or Console(stderr=True)) as progress:
        parts = [str(STORE_VERSION), _content_hash(files, progress), renderer.fingerprint]
        fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        place = root / f"{source.name.split('.')[0]}-{fingerprint[:16]}"
        store = _open(place, fingerprint, source, files)
        if not store:
            shutil.rmtree(place, ignore_errors=True)  # One that was damaged.
            with written_whole(place) as folder:
                facts = {"version": STORE_VERSION, "fingerprint": fingerprint}
                _write_rows(source, renderer, folder, facts, vocab_size=vocab_size, progress=progress)
            store = _open(place, fingerprint, source, files)
    assert store, "a store that was just written can be opened"
    if store.highest_token >= vocab_size:
        raise DataError(_vocabulary_too_small(store.highest_token, vocab_size, renderer, store.source))
    return store


def _write_rows(
    source: Path, renderer: Renderer, folder: Path, facts: dict[str, object], *, vocab_size: int, progress: Progress
) -> None:
    files = source_files(source)
    total = sum(file.stat().st_size for file in files)
    bar = progress.add_task(f"tokens of {source.name}", total=total)
    rows = read_rows(source, on_read=lambda count: progress.advance(bar, count))
    highest = 0
    with StoreWriter(folder, files=files, vocab_size=vocab_size) as writer:
        for batch in _batches(rows):
            for row, document in zip(batch, renderer.documents(batch), strict=True):
                highest = max(highest, max(document.tokens, default=0))
                if highest >= vocab_size:
                    raise DataError(_vocabulary_too_small(highest, vocab_size, renderer, str(row.place)))
                writer.add(document, row.place)
        writer.finish(**facts, highest_token=highest)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += row.characters
        if len(batch) == ROWS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _open(folder: Path, fingerprint: str, source: Path, files: list[Path]) -> TokenStore | None:
    """The store in that folder, if it is one of this fingerprint and its files have their sizes.

    The source may have had another name when it was written: the names given now count.
    """
    try:
        facts = json.loads((folder / "store.json").read_bytes())
        if facts["fingerprint"] != fingerprint:
            return None
        rows, tokens = facts["documents"], facts["tokens"]
        shapes = {"tokens": tokens, "targets": tokens, "offsets": rows + 1, "counts": rows, "lines": rows}
        kinds = {"tokens": np.dtype(facts["dtype"]), "targets": np.dtype(bool)}
        arrays = {}
        for name in FILES:
            kind, file = kinds.get(name, np.dtype(np.int64)), folder / f"{name}.bin"
            if file.stat().st_size != shapes[name] * kind.itemsize:
                return None
            arrays[name] = np.memmap(file, kind, "r") if shapes[name] else np.zeros(0, kind)
        return TokenStore(
            folder=folder,
            fingerprint=fingerprint,
            source=str(source),
            sources=[(str(files[number]), first) for number, first in facts["first_rows"]],
            highest_token=facts["highest_token"],
            straddling_tokens=facts["straddling_tokens"],
            dropped_reasoning=facts["dropped_reasoning"],
            tokens_T=arrays["tokens"],
            is_target_T=arrays["targets"],
            offsets_N1=np.array(arrays["offsets"]),
            target_counts_N=np.array(arrays["counts"]),
            lines_N=arrays["lines"],
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _content_hash(files: list[Path], progress: Progress) -> str:
    """sha256 of the bytes of all files and of where each ends."""
    digest = hashlib.sha256()
    bar = progress.add_task("reading", total=sum(file.stat().st_size for file in files if file.exists()))
    for file in files:
        try:
            with file.open("rb") as content:
                while block := content.read(HASHED_AT_ONCE_BYTES):
                    digest.update(block)
                    progress.advance(bar, len(block))
                digest.update(f"\n{content.tell()}\n".encode())
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    progress.remove_task(bar)
    return digest.hexdigest()


def _vocabulary_too_small(token: int, vocab_size: int, renderer: Renderer, where: str) -> str:
    text = renderer.tokenizer.convert_ids_to_tokens(token)
    return (
        f"{where}: the tokenizer gives token {token:,} ({text}), but the model's vocabulary ends at {vocab_size - 1:,} "
        f"(vocab_size = {vocab_size:,} in config.json): tokenizer and model do not belong together, or the tokenizer "
        "got more tokens than the model's embeddings were grown by"
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
