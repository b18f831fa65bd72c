"""Rows out of files, one after another: JSON lines, Parquet, and folders of them or of Hugging Face `datasets`."""

import difflib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from gatewright.data.rows import Place, Row, parse_row, shortened
from gatewright.spec.errors import DataError

KINDS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
COLUMNS = ("messages", "tools", "prompt", "completion", "text")
ROWS_AT_ONCE = 256
"""Rows of a table that are turned into Python objects at one time."""

Read = Callable[[int], None]
"""Called with the number of bytes of the files that have been read since the last call."""


def read_rows(path: Path, *, on_read: Read = lambda _: None) -> Iterator[Row]:
    """Every row of a file or folder, in order, holding only a few in memory.

    Raises DataError with the place of the first row that is not a conversation, a prompt with completion, or a text,
    and for a file that is missing, empty, damaged, of an unknown kind, or not UTF-8.
    """
    rows = 0
    for file in source_files(path):
        for place, value in _read_file(file, on_read):
            yield parse_row(value, place)
            rows += 1
    if not rows:
        raise DataError(f"{path}: no rows in it; data needs at least one")


def source_files(path: Path) -> list[Path]:
    """The files that hold the rows of `path`, in the order in which they are read."""
    if path.is_dir():
        return _files_of_folder(path)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder{_nearest(path)}")
    if not _kind(path):
        raise DataError(f"{path}: data is read from {', '.join(KINDS[:-1])} or a folder, not from this kind of file")
    return [path]


def _files_of_folder(folder: Path) -> list[Path]:
    """Shards in the order that `datasets` recorded, or sorted by name; never of two splits together."""
    if (folder / "dataset_dict.json").exists():
        splits = sorted(sub.name for sub in folder.iterdir() if (sub / "state.json").exists())
        raise DataError(
            f"{folder}: a dataset of several splits; name one: {', '.join(str(folder / s) for s in splits)}"
        )
    state = folder / "state.json"
    if state.exists():
        try:
            return [folder / entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{state}: damaged, so the order of the shards is unknown; save the dataset again"
            ) from None
    kinds = tuple(kind for kind in KINDS if kind != ".json")  # In a folder, these are as a rule about the data.
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name.endswith(kinds))
    if not files:
        held = sorted(file.name for file in folder.iterdir())[:5]
        raise DataError(f"{folder}: no {', '.join(kinds)} file in it; it holds {', '.join(held) or 'nothing'}")
    mixed = sorted({file.name.split("-")[0].split(".")[0] for file in files} & {*SPLITS})
    if len(mixed) > 1:
        raise DataError(f"{folder}: files of several splits ({', '.join(mixed)}); put one into its own folder")
    return files


def _kind(file: Path) -> str | None:
    return next((kind for kind in KINDS if file.name.endswith(kind)), None)


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist"
    names = [file.name for file in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _read_file(file: Path, on_read: Read) -> Iterator[tuple[Place, object]]:
    kind = _kind(file)
    try:
        if kind == ".parquet":
            yield from _read_parquet(file, on_read)
        elif kind == ".arrow":
            yield from _read_arrow(file, on_read)
        else:
            yield from _read_lines(file, on_read, compressed=kind == ".jsonl.gz")
    except FileNotFoundError:
        raise DataError(f"{file}: missing, though the dataset's own list names it") from None
    except (pyarrow.ArrowInvalid, EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file}: damaged or cut short ({shortened(what)}); copy it again from its source") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None


def _read_lines(file: Path, on_read: Read, *, compressed: bool) -> Iterator[tuple[Place, object]]:
    with file.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if compressed else raw
        seen = 0
        for number, line in enumerate(lines, start=1):
            # In a compressed file the position moves only when another block is fetched; that is exact enough.
            read = raw.tell() if compressed else seen + len(line)
            on_read(read - seen)
            seen = read
            place = Place(str(file), number, is_line=True)
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                yield place, _decode(line, place)


def _decode(line: bytes, place: Place) -> object:
    """The JSON value of one line."""
    try:
        text = line.decode("utf-8-sig" if place.number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 at byte {error.start + 1} of the line; convert the file, for example with "
            f"iconv -f LATIN1 -t UTF-8"
        ) from None
    if place.number == 1 and text.startswith("["):
        raise DataError(f"{place}: a JSON list; wanted one row a line (jq -c '.[]' {place.file} writes that)")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos + 1}"
        raise DataError(f"{place}: not JSON: {what}: {shortened(text)}") from None
    except RecursionError:
        raise DataError(f"{place}: nested too deep to be read: {shortened(text)}") from None
    if b"\\ud" in line.lower() and not _encodable(value):
        raise DataError(
            f"{place}: half of a surrogate pair (\\ud800 to \\udfff), which is no character: {shortened(text)}"
        )
    return value


def _encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(file: Path, on_read: Read) -> Iterator[tuple[Place, object]]:
    with pyarrow.parquet.ParquetFile(file) as table:
        rows, size = table.metadata.num_rows, file.stat().st_size
        columns = [name for name in table.schema_arrow.names if name in COLUMNS] or table.schema_arrow.names
        batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
        yield from _table_rows(file, batches, size / max(rows, 1), on_read)


def _read_arrow(file: Path, on_read: Read) -> Iterator[tuple[Place, object]]:
    """An Arrow stream as `datasets` writes it, mapped into memory and not read at once."""
    with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:

        def batches() -> Iterator[pyarrow.RecordBatch]:
            for batch in stream:
                kept = [name for name in batch.schema.names if name in COLUMNS] or batch.schema.names
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    yield batch.select(kept).slice(start, ROWS_AT_ONCE)

        before = 0
        for place, value in _table_rows(file, batches(), 0.0, on_read):
            on_read(mapped.tell() - before)
            before = mapped.tell()
            yield place, value


def _table_rows(
    file: Path, batches: Iterator[pyarrow.RecordBatch], row_bytes: float, on_read: Read
) -> Iterator[tuple[Place, object]]:
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield Place(str(file), number, is_line=False), _without_nulls(value)
        on_read(round(batch.num_rows * row_bytes))


def _without_nulls(value: object) -> object:
    """The value without the nulls that a table must store for each key that some other row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
