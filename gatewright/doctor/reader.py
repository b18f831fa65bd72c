"""The stream reader: finds the few lines of a log that bear a sign, at some hundred megabytes a second.

A log repeats itself. Lines are compared with their digits removed (their form), a whole chunk at a time; only a form
that is new is searched for literals, and only for those whose main word is among the words of the chunk. What is kept
is bounded: forms, words, and the lines around.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gatewright.doctor.cause import Sign

PIECE_END = b"\x1e\n"
"""Ends a piece of a line that goes on: after a carriage return of a progress bar, or where a line is endless."""
MAX_LINE_BYTES = 2**16
BEFORE_LINES = 240
AFTER_LINES = 48
MAX_HELD_BYTES = 2**21
"""Of lines that wait for those after them; of very long ones fewer wait."""
MAX_FORMS = 60_000
MAX_FORM_BYTES = 2048
MAX_WORDS = 200_000
MAX_WORD_BYTES = 256
"""A longer run of letters is data, not text."""
MAX_WATCHED = 8_000
VISITS = 64
"""A form is looked at so many times; later lines of it are passed over."""
MAX_VISITS = 4_000
"""Lines that are looked at for one sign, whatever their forms."""
NUMBERS_A_CHUNK = 512
"""Lines with numbers that are read of one chunk, evenly spread."""
MAX_TEXT = 4_000
"""Characters of a line that are kept."""
_DIGITS = b"0123456789"
_LETTERS = re.compile(rb"[A-Za-z]{3,}")
_TO_SPACE = bytes(byte if bytes([byte]).isalpha() or byte == 10 else 32 for byte in range(256))
_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)|[@-Z\\-_])")

Around = Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of interest with the lines around it."""

    number: int
    raw: bytes
    """Without colours; at most a chunk long."""
    matches: tuple[int, ...]
    """Indexes of the signs whose literal the line holds."""
    first_visits: bool
    """Whether it is among the first lines of its form."""
    around: Around
    """The lines before and after it."""

    @property
    def text(self) -> str:
        return _text(self.raw)


@dataclass(slots=True)
class _Form:
    matches: tuple[int, ...]
    numbers: bool
    """Lines of this form hold numbers that are wanted all along."""
    visits: int = 0


class Reader:
    """Yields the lines that hold a literal of a sign; of signs marked in `numbers`, lines from all over the log."""

    def __init__(self, signs: Sequence[Sign], *, numbers: Sequence[bool]) -> None:
        self._numbers = tuple(numbers)
        self._left = [MAX_VISITS] * len(signs)
        self._vocabulary = Vocabulary(signs)
        self._forms: set[bytes] = set()
        self._watched: dict[bytes, _Form] = {}
        self._held: list[bytes] = []
        self._past: list[bytes] = []
        self._carry = b""
        self._line = 1
        self.lines = 0
        self.bytes = 0

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines of interest that are complete after this chunk, and have the lines after them."""
        self.bytes += len(chunk)
        if b"\0" in chunk:  # holes that a file system leaves where a node was lost
            chunk = chunk.translate(None, b"\0")
        text = self._carry + chunk
        tail = b""
        if text.endswith(b"\r"):  # its newline may come with the next chunk
            text, tail = text[:-1], b"\r"
        end = text.rfind(b"\n") + 1
        if not end and len(text) < 4 * MAX_LINE_BYTES:
            self._carry = text + tail
            return
        if not end:
            text = b"".join(text[at : at + MAX_LINE_BYTES] + PIECE_END for at in range(0, len(text), MAX_LINE_BYTES))
            end = len(text)
        text, self._carry = text[:end], text[end:] + tail
        yield from self._read(_normal(text), last=False)

    def finish(self) -> Iterator[Line]:
        """What is left at the end of the log."""
        text, self._carry = self._carry, b""
        yield from self._read(_normal(text + b"\n") if text.strip() else b"", last=True)
        self.lines = self._line - 1

    def _read(self, text: bytes, *, last: bool) -> Iterator[Line]:
        text = b"\n".join((*self._held, text))
        raw = text.split(b"\n")
        if not raw[-1]:
            raw.pop()
        forms = text.translate(None, _DIGITS).split(b"\n")
        ready = len(raw) if last else max(0, len(raw) - _to_hold(raw))
        kinds = set(forms)
        self._learn(kinds)
        wanted = {form for form in self._watched.keys() & kinds if self._is_wanted(form)}
        places = [at for at, form in enumerate(forms[:ready]) if form in wanted] if wanted else []
        number_at = _numbering(raw, self._line)
        for at in self._visited(places, forms):
            form = self._watched[forms[at]]
            form.visits += 1
            for index in form.matches:
                self._left[index] -= 1
            yield Line(number_at(at), raw[at], form.matches, form.visits <= VISITS, self._around(raw, at))
        self._line = number_at(ready)
        past = self._past + raw[max(0, ready - BEFORE_LINES) : ready]
        self._past = [line[:MAX_TEXT] for line in past[-BEFORE_LINES:]]
        self._held = raw[ready:]

    def _is_wanted(self, form: bytes) -> bool:
        known = self._watched[form]
        return known.numbers or (known.visits < VISITS and any(self._left[index] > 0 for index in known.matches))

    def _visited(self, places: list[int], forms: list[bytes]) -> Iterator[int]:
        """Places to look at: all new ones, and of those with numbers an even selection with the last one."""
        numbers = sum(self._watched[forms[at]].numbers for at in places)
        stride = max(1, -(-numbers // NUMBERS_A_CHUNK))
        seen = 0
        for at in places:
            form = self._watched[forms[at]]
            if form.numbers:
                seen += 1
                if form.visits >= VISITS and (numbers - seen) % stride:
                    continue
            elif form.visits >= VISITS:
                continue
            yield at

    def _learn(self, kinds: set[bytes]) -> None:
        """Watch those of the new forms that hold a literal."""
        if len(self._watched) > MAX_WATCHED:
            self._watched = dict(list(self._watched.items())[-MAX_WATCHED // 2 :])
            self._forms.clear()
        new = kinds - self._forms
        for form, matches in self._vocabulary.search(new).items():
            if form not in self._watched:
                self._watched[form] = _Form(matches, numbers=any(self._numbers[index] for index in matches))
        if len(self._forms) + len(new) > MAX_FORMS:
            self._forms.clear()
        if len(new) < MAX_FORMS:
            self._forms |= {form for form in new if len(form) < MAX_FORM_BYTES}

    def _around(self, raw: list[bytes], at: int) -> Around:
        past = self._past

        def around() -> tuple[tuple[str, ...], tuple[str, ...]]:
            before = raw[max(0, at - BEFORE_LINES) : at]
            before = past[len(before) - BEFORE_LINES :] + before if len(before) < BEFORE_LINES else before
            return tuple(map(_text, before[-BEFORE_LINES:])), tuple(map(_text, raw[at + 1 : at + 1 + AFTER_LINES]))

        return around


class Vocabulary:
    """Finds forms with literals, by the longest word of each literal."""

    def __init__(self, signs: Sequence[Sign]) -> None:
        self._signs: dict[bytes, list[int]] = {}
        for index, one in enumerate(signs):
            for text in one.literals:
                self._signs.setdefault(text.encode(), []).append(index)
        self._by_key: dict[bytes, list[bytes]] = {}
        self._always: list[bytes] = []
        for literal in self._signs:
            words: list[bytes] = _LETTERS.findall(literal)
            if words:
                key = max(words, key=len)
                self._by_key.setdefault(key, []).append(literal)
            else:
                self._always.append(literal)
        self._keys = re.compile(b"|".join(map(re.escape, self._by_key)))
        self._words: set[bytes] = set()
        self._hot: dict[bytes, list[bytes]] = {}

    def search(self, forms: set[bytes]) -> dict[bytes, tuple[int, ...]]:
        """Forms that hold literals, each with the indexes of the signs."""
        text = b"\n".join(forms)
        found: dict[bytes, set[int]] = {}
        for literal in self._present(text):
            indexes = self._signs[literal]
            at = text.find(literal)
            while at >= 0:
                start, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
                end = len(text) if end < 0 else end
                found.setdefault(text[start:end], set()).update(indexes)
                at = text.find(literal, end)
        return {form: tuple(sorted(indexes)) for form, indexes in found.items()}

    def _present(self, text: bytes) -> list[bytes]:
        """Literals that may be in the text, by its words."""
        words = set(text.translate(_TO_SPACE).split())
        fresh = words - self._words
        for word in fresh:
            if len(word) <= MAX_WORD_BYTES and self._keys.search(word):
                self._hot[word] = [
                    literal for key, literals in self._by_key.items() if key in word for literal in literals
                ]
        if len(self._words) + len(fresh) > MAX_WORDS:
            self._words.clear()
            self._hot = {word: self._hot[word] for word in words & self._hot.keys()}
            fresh = words
        self._words |= fresh
        hot = words & self._hot.keys()
        return [*self._always, *dict.fromkeys(literal for word in hot for literal in self._hot[word])]


def _to_hold(raw: list[bytes]) -> int:
    """How many of the last lines wait for the next chunk."""
    count = AFTER_LINES
    while count and sum(map(len, raw[-count:])) > MAX_HELD_BYTES:
        count //= 2
    return count


def _numbering(raw: list[bytes], first: int) -> Callable[[int], int]:
    """Line number by place: pieces of one line share it."""
    pieces = [at for at, piece in enumerate(raw) if piece.endswith(b"\x1e")]
    if not pieces:
        return lambda at: first + at
    numbers, number, cut = [], first, set(pieces)
    for at in range(len(raw)):
        numbers.append(number)
        number += at not in cut
    numbers.append(number)
    return lambda at: numbers[at]


def _normal(text: bytes) -> bytes:
    """Without colours; carriage returns of progress bars as ends of pieces."""
    if b"\x1b" in text:
        text = _ANSI.sub(b"", text)
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", PIECE_END)
    return text


def _text(piece: bytes) -> str:
    return piece[:MAX_TEXT].decode("utf-8", "replace").rstrip("\x1e\r\n\x00 ")
