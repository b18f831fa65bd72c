"""A YAML text as plain values, with the place where each of them was written."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

from gatewright.spec.errors import RunFileError

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a document."""

MAX_DEPTH = 12
BARE_WORDS = frozenset({"yes", "no", "on", "off"})

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_GLUED = re.compile(r"\s*[A-Za-z_]\w*:(?=[^\s/:])")
"""A key whose ':' has no space after it, which YAML takes for a text."""
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}

_SYNTAX = [
    ("found character '\\t'", "a tab; YAML takes spaces only"),
    ("cannot start any token", "text that begins with this character needs quotes"),
    (
        "mapping values are not allowed",
        "a ':' that fits nothing; look at the indentation, or quote a text that holds ': '",
    ),
    ("could not find expected ':'", "neither a key nor its value; a key ends in ':' and a space"),
    ("expected <block end>", "this line's indentation fits no section above it"),
    ("expected ',' or '}'", "the '{' is not closed, or a ',' is missing"),
    ("expected ',' or ']'", "the '[' is not closed, or a ',' is missing"),
    ("expected the node content", "a value is missing, or a '[' or '{' is not closed"),
    ("while scanning a quoted scalar", "the quote is not closed"),
    ("expected '<document start>'", "text after the end of the document"),
]
"""What PyYAML says, and what a person can do about it; the first match wins."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something was written; places sort as a person reads them."""

    order: int
    text: str


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One thing to change in a document."""

    place: Place
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place.text, self.key, self.text) if part)


class Unreadable(RunFileError):
    """A text that is no YAML, or YAML that a run file does not use."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(str(mistake))
        self.mistake = mistake


@dataclass(frozen=True, slots=True)
class Spot:
    """How one value was written."""

    place: Place
    text: str | None = None
    """The scalar as it stands in the text; None for a mapping or a list."""
    quoted: bool = False

    @property
    def bare_word(self) -> bool:
        """A word that is a switch to a YAML 1.1 reader and a text to a YAML 1.2 reader."""
        return self.text is not None and not self.quoted and self.text.lower() in BARE_WORDS


@dataclass(slots=True)
class Document:
    """Plain values (None, bool, int, float, str, list, dict) and their spots."""

    value: object = None
    spots: dict[KeyPath, Spot] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    """What can be complained about without stopping: keys written twice."""


def plain_value(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar by YAML 1.2's core rules, and `131_072` as an integer.

    PyYAML follows YAML 1.1, where 2e-4 is a text, `no` is false, 010 is eight and 1:30 is ninety.
    """
    if len(text) > 100:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text) and abs(number := float(text)) < float("inf"):
        return number
    return text


def read_yaml(text: str, place: Callable[[int], Place]) -> Document:
    """Read one YAML document of plain values; `place` names a line counted from 1.

    Raises Unreadable where the text is not YAML, and where it holds what a run file never needs: anchors and
    aliases (a few lines of them can stand for gigabytes), tags, several documents, deep nesting.
    """
    try:
        return _Composer(text, place).document()
    except yaml.MarkedYAMLError as error:
        raise Unreadable(_syntax_mistake(error, text, place)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Unreadable(
            Mistake(place(line), "", f"a control character (0x{error.character:02x}); remove it")
        ) from None


class _Composer:
    """Builds a Document from YAML events, one pass, first to last."""

    def __init__(self, text: str, place: Callable[[int], Place]) -> None:
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._place = place
        self._document = Document()

    def document(self) -> Document:
        next(self._events)  # stream start
        if isinstance(next(self._events), yaml.DocumentStartEvent):
            self._document.value = self._node(next(self._events), ())
            next(self._events)  # document end
            event = next(self._events)
            if not isinstance(event, yaml.StreamEndEvent):
                raise self._refused(event, "a second document begins here; a run file holds one")
        return self._document

    def _node(self, event: yaml.Event, path: KeyPath) -> object:
        assert isinstance(event, yaml.events.NodeEvent), event
        if event.anchor is not None:
            raise self._refused(event, "anchors (&) and aliases (*) are not read; write the value, or quote a text")
        assert isinstance(event, yaml.ScalarEvent | yaml.events.CollectionStartEvent), event
        if event.tag is not None:
            raise self._refused(
                event, f"the tag {event.tag.replace('tag:yaml.org,2002:', '!!')} is not read; write a plain value"
            )
        if len(path) > MAX_DEPTH:
            raise self._refused(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.ScalarEvent):
            quoted = event.style is not None
            self._document.spots[path] = Spot(self._where(event), event.value, quoted)
            return event.value if quoted else plain_value(event.value)
        self._document.spots.setdefault(path, Spot(self._where(event)))
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._list(path)

    def _list(self, path: KeyPath) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items))))
        return items

    def _mapping(self, path: KeyPath) -> dict[str, object]:
        mapping: dict[str, object] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refused(event, "a key must be a word; quote a text that begins with [, { or *")
            below, where = (*path, event.value), self._where(event)
            if event.value in mapping:
                first = self._document.spots[below].place.text
                self._document.mistakes.append(Mistake(where, dotted(below), f"written twice, first at {first}"))
            self._document.spots[below] = Spot(where)
            mapping[event.value] = self._node(next(self._events), below)
        return mapping

    def _where(self, event: yaml.Event) -> Place:
        assert event.start_mark is not None, event
        return self._place(event.start_mark.line + 1)

    def _refused(self, event: yaml.Event, sentence: str) -> Unreadable:
        return Unreadable(Mistake(self._where(event), "", sentence))


def dotted(path: KeyPath) -> str:
    """A path as a person writes it: `train.lr`, `method.adapter.targets[1]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _syntax_mistake(error: yaml.MarkedYAMLError, text: str, place: Callable[[int], Place]) -> Mistake:
    """Our sentence for PyYAML's, and the line itself with a caret below the spot."""
    said = f"{error.context or ''} {error.problem or ''}"
    opened = error.context_mark is not None and ("scanning a" in said or "expected ','" in said)
    mark = error.context_mark if opened else error.problem_mark
    assert mark is not None, error
    lines = text.splitlines() or [""]
    row = min(mark.line, len(lines) - 1)
    column = mark.column if row == mark.line else len(lines[row])
    sentence = next((ours for theirs, ours in _SYNTAX if theirs in said), error.problem or said.strip())
    indent = lines[row][: len(lines[row]) - len(lines[row].lstrip())]
    if "\t" in indent:
        sentence, column = "a tab; YAML takes spaces only", indent.index("\t")
    elif "':'" in said or "mapping values" in said:
        for above in (row, row - 1):
            if above >= 0 and (glued := _GLUED.match(lines[above])):
                sentence, row, column = "a space must follow the ':'", above, glued.end()
                break
    start = max(0, column - 60)
    shown = lines[row][start : start + 100].replace("\t", "→")
    number = str(row + 1)
    excerpt = f"    {number} | {shown}\n    {' ' * len(number)} | {' ' * (column - start)}^"
    return Mistake(place(row + 1), "", f"not valid YAML: {sentence}\n{excerpt}")
