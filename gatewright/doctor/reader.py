"""The stream reader: finds the few lines of a log that bear a sign, at some hundred megabytes a second.

A log repeats itself. Lines are compared with their digits removed, as a whole chunk at a time; only a line that is
new in this form is searched for signs. What is kept is bounded: forms, sightings and the text around them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gatewright.doctor.cause import Sign

PIECE_END = b"\x1e\n"
"""Ends a piece of a line that goes on: after a carriage return of a progress bar, or where a line is endless."""
MAX_LINE_BYTES = 2**16
BEFORE_LINES = 240
AFTER_LINES = 48
MAX_FORMS = 60_000
MAX_WATCHED = 8_000
VISITS = 64
"""A form is looked at so many times; later lines of it are only counted."""
MAX_TEXT = 4_000
"""Characters of a line that are kept."""
_DIGITS = b"0123456789"
_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of interest with the lines around it."""

    number: int
    raw: bytes
    """Without colours; at most a chunk long."""
    matches: tuple[int, ...]
    """Indexes of the signs whose literal the line holds."""
    count: int
    """How many lines of this form there were so far, this one included."""
    around: "Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]"
    """The lines before and after it."""

    @property
    def text(self) -> str:
        return _text(self.raw)


@dataclass(slots=True)
class _Form:
    matches: tuple[int, ...]
    every: bool
    """Visit all lines of this form, not only the first ones."""
    count: int = 0


class Reader:
    """Yields the lines that hold a literal of a sign. `every` are the signs of which all lines are wanted."""

    def __init__(self, signs: Sequence[Sign], *, every: Sequence[bool]) -> None:
        self._literals = [tuple(text.encode() for text in sign.literals) for sign in signs]
        self._every = tuple(every)
        self._any = re.compile(b"|".join(re.escape(text) for texts in self._literals for text in sorted(texts)))
        self._forms: set[bytes] = set()
        self._watched: dict[bytes, _Form] = {}
        self._held: list[bytes] = []
        self._past: list[bytes] = []
        self._carry = b""
        self._line = 1
        self.lines = 0
        self.bytes = 0

    def read(self, chunks: Iterable[bytes]) -> Iterator[Line]:
        """All lines of interest of one log."""
        for chunk in chunks:
            yield from self.feed(chunk)
        yield from self.finish()

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines of interest that are complete after this chunk, and have the lines after them."""
        self.bytes += len(chunk)
        text = self._carry + chunk
        if text.endswith(b"\r"):  # its newline may come with the next chunk
            text, self._carry = text[:-1], b"\r"
        else:
            self._carry = b""
        end = text.rfind(b"\n") + 1
        if not end and len(text) < 4 * MAX_LINE_BYTES:
            self._carry = text + self._carry
            return
        if not end:
            end, text = len(text), text + PIECE_END
            end = len(text)
        rest, text = text[end:], text[:end]
        self._carry = rest + self._carry
        yield from self._pieces(_normal(text), last=False)

    def finish(self) -> Iterator[Line]:
        """What is left at the end of the log."""
        text, self._carry = self._carry, b""
        yield from self._pieces(_normal(text + b"\n") if text.strip() else b"", last=True)
        self.lines = self._line - 1

    def _pieces(self, text: bytes, *, last: bool) -> Iterator[Line]:
        held = self._held
        new_bytes = b"\n".join([*held, text]) if held else text
        raw = new_bytes.split(b"\n")
        if raw and not raw[-1]:
            raw.pop()
        forms = new_bytes.translate(None, _DIGITS).split(b"\n")[: len(raw)]
        ready = len(raw) if last else max(0, len(raw) - AFTER_LINES)
        self._learn(set(forms))
        if self._watched.keys() & forms[:ready]:
            yield from self._visit(raw, forms, ready)
        else:
            self._line += _newlines(raw[:ready])
        self._past = (self._past + raw[max(0, ready - BEFORE_LINES) : ready])[-BEFORE_LINES:]
        self._held = raw[ready:]

    def _learn(self, forms: set[bytes]) -> None:
        new = forms - self._forms
        if len(self._forms) + len(new) > MAX_FORMS:
            self._forms.clear()
        if len(new) < MAX_FORMS:
            self._forms |= {form for form in new if len(form) < 2048}
        for form in new:
            if form in self._watched or self._any.search(form) is None:
                continue
            matches = tuple(i for i, texts in enumerate(self._literals) if any(text in form for text in texts))
            if len(self._watched) < MAX_WATCHED:
                self._watched[form] = _Form(matches, every=any(self._every[i] for i in matches))

    def _visit(self, raw: list[bytes], forms: list[bytes], ready: int) -> Iterator[Line]:
        number = self._line
        find = self._watched.get
        for at in range(ready):
            piece = raw[at]
            if (form := find(forms[at])) is not None:
                form.count += 1
                if form.every or form.count <= VISITS:
                    yield Line(number, piece, form.matches, form.count, self._context(raw, at))
            if not piece.endswith(b"\x1e"):
                number += 1
        self._line = number

    def _context(self, raw: list[bytes], at: int) -> Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]:
        past = self._past

        def around() -> tuple[tuple[str, ...], tuple[str, ...]]:
            before = raw[max(0, at - BEFORE_LINES) : at]
            before = past[len(before) - BEFORE_LINES :] + before if len(before) < BEFORE_LINES else before
            return tuple(map(_text, before[-BEFORE_LINES:])), tuple(map(_text, raw[at + 1 : at + 1 + AFTER_LINES]))

        return around


def _normal(text: bytes) -> bytes:
    """Without colours; carriage returns of progress bars as ends of pieces."""
    if b"\x1b" in text:
        text = _ANSI.sub(b"", text)
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", PIECE_END)
    return text


def _newlines(pieces: list[bytes]) -> int:
    return len(pieces) - sum(piece.endswith(b"\x1e") for piece in pieces)


def _text(piece: bytes) -> str:
    return piece[:MAX_TEXT].decode("utf-8", "replace").rstrip("\x1e\r\n\x00 ")
