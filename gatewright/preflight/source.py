"""Files as text, and text as values with their lines: bounded in size, whatever is in them."""

import json
import re
from bisect import bisect_left
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from gatewright.spec.document import Document, Place, Spot, Unreadable, dotted, read_yaml
from gatewright.spec.errors import UserError

MAX_BYTES = 2**18
MAX_JSON_DEPTH = 32
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_SECRET = re.compile(r"\b(hf_|sk-|ghp_)[A-Za-z0-9_-]{16,}")
_SECRET_KEY = re.compile(
    r"((?:(?:hub|hf|auth|access|github)_?token|api[-_]key|secret|password)[\"']?\s*[:=]\s*)(?!\$)[^\s,]+", re.I
)
_WORDS = {"true": True, "false": False, "null": None}


class UnreadableFile(UserError):
    """A file that is no config: missing, a folder, binary, too large, not YAML or JSON."""


@dataclass(frozen=True, slots=True)
class Source:
    """One text file, whole."""

    path: Path
    name: str
    """As the user wrote it."""
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One scalar or list of scalars of a config, under its dotted key."""

    key: str
    value: Any
    line: int


def read_source(path: Path, name: str = "") -> Source:
    """The text of a config file, 256 KiB at most. Raises UnreadableFile, which says what to give instead."""
    name = name or str(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would wait for ever
            raise UnreadableFile(f"{name} is no regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableFile(f"{name}: no such file") from None
    except IsADirectoryError:
        raise UnreadableFile(f"{name} is a folder; wanted a config file, an sbatch script or a checkpoint") from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{name[:200]}: cannot be read: {said_by_system(error)}") from None
    if len(raw) > MAX_BYTES:
        raise UnreadableFile(f"{name} is larger than 256 KiB; a config is a page or two. Is this the right file?")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableFile(f"{name} is UTF-16; save it as UTF-8 text")
    if b"\0" in raw:
        raise UnreadableFile(f"{name} is a binary file; wanted YAML, JSON or a shell script")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UnreadableFile(
            f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8 text"
        ) from None
    if not text.strip():
        raise UnreadableFile(f"{name} is empty")
    return Source(path=path, name=name, text=text.replace("\r\n", "\n"))


def hide(text: str) -> str:
    """The text without what looks like a credential."""
    return _SECRET.sub("…", _SECRET_KEY.sub(r"\1…", text))


def said_by_system(error: Exception) -> str:
    """What the operating system said, without the path."""
    return error.strerror or "unknown error" if isinstance(error, OSError) else str(error)


def read_document(source: Source) -> Document:
    """YAML or JSON as values and the line of each. Raises UnreadableFile."""
    if source.text.lstrip().startswith("{") and source.path.suffix.lower() not in {".yaml", ".yml"}:
        return _Json(source).document()
    try:
        return read_yaml(source.text, lambda line: Place(line, f"{source.name}:{line}"))
    except Unreadable as error:
        raise UnreadableFile(str(error)) from None


def leaves(document: Document) -> list[Leaf]:
    """Every scalar and every list that holds only scalars, by dotted key, in the order written."""
    found: list[Leaf] = []
    _collect(document.value, (), document, found)
    return found


def _collect(value: object, path: tuple[str | int, ...], document: Document, found: list[Leaf]) -> None:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            _collect(below, (*path, key), document, found)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            _collect(item, (*path, index), document, found)
    elif path:
        found.append(Leaf(dotted(path), value, document.spots[path].place.order))


class _Json:
    """A JSON reader that keeps the line of every value; the standard one knows no lines and recurses without bound."""

    def __init__(self, source: Source) -> None:
        self._source, self._text = source, source.text
        self._document = Document()
        self._newlines = [match.start() for match in re.finditer("\n", source.text)]

    def document(self) -> Document:
        self._document.value, end = self._value(self._skip(0), ())
        if (rest := self._skip(end)) < len(self._text):
            raise self._refused(rest, "text after the end of the document")
        return self._document

    def _value(self, at: int, path: tuple[str | int, ...]) -> tuple[object, int]:
        if len(path) > MAX_JSON_DEPTH:
            raise self._refused(at, f"nested more than {MAX_JSON_DEPTH} levels deep")
        self._document.spots.setdefault(path, Spot(Place(self._line(at), "")))
        char = self._text[at : at + 1]
        if char == "{":
            return self._object(at, path)
        if char == "[":
            return self._list(at, path)
        if char == '"':
            return self._string(at)
        for word, value in _WORDS.items():
            if self._text.startswith(word, at):
                return value, at + len(word)
        if match := _NUMBER.match(self._text, at):
            number = match.group()
            if len(number) > 100:
                raise self._refused(at, "a number of more than 100 digits")
            return (int(number) if number.lstrip("-").isdecimal() else float(number)), match.end()
        raise self._refused(at, "not valid JSON: a value is missing, or is written in a way JSON does not know")

    def _object(self, at: int, path: tuple[str | int, ...]) -> tuple[object, int]:
        found: dict[str, object] = {}
        at = self._skip(at + 1)
        while self._text[at : at + 1] != "}":
            if self._text[at : at + 1] != '"':
                raise self._refused(at, 'not valid JSON: wanted a key in "quotes" or a }')
            start = at
            key, at = self._string(at)
            at = self._skip(at)
            if self._text[at : at + 1] != ":":
                raise self._refused(at, "not valid JSON: wanted a ':' after the key")
            self._document.spots[(*path, key)] = Spot(Place(self._line(start), ""))
            found[key], at = self._value(self._skip(at + 1), (*path, key))
            at = self._comma(at, "}")
        return found, at + 1

    def _list(self, at: int, path: tuple[str | int, ...]) -> tuple[object, int]:
        items: list[object] = []
        at = self._skip(at + 1)
        while self._text[at : at + 1] != "]":
            item, at = self._value(at, (*path, len(items)))
            items.append(item)
            at = self._comma(at, "]")
        return items, at + 1

    def _comma(self, at: int, closing: str) -> int:
        at = self._skip(at)
        if self._text[at : at + 1] == ",":
            return self._skip(at + 1)
        if self._text[at : at + 1] != closing:
            raise self._refused(at, f"not valid JSON: wanted a ',' or a {closing}")
        return at

    def _string(self, at: int) -> tuple[str, int]:
        try:
            text, end = json.decoder.py_scanstring(self._text, at + 1, strict=False)  # type: ignore[attr-defined]
        except JSONDecodeError:
            raise self._refused(at, "not valid JSON: the quote is not closed") from None
        return str(text), int(end)

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        assert match is not None
        return match.end()

    def _line(self, at: int) -> int:
        return bisect_left(self._newlines, at) + 1

    def _refused(self, at: int, sentence: str) -> UnreadableFile:
        return UnreadableFile(f"{self._source.name}:{self._line(at)}: {sentence}")
