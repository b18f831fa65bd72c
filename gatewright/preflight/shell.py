"""A shell script as settings and commands: #SBATCH lines, assignments and what is started, each word with its line."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from gatewright.preflight.source import Source

MAX_WORDS = 20_000
"""Of a script, variables put in; a script that grows beyond is not read further."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_ARRAY = re.compile(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=\((.*)\)\s*;?", re.S)
_DECLARES = frozenset({"export", "declare", "local", "readonly"})
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_WHOLE_VARIABLE = re.compile(r"\"?\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?\"?")


@dataclass(frozen=True, slots=True)
class Token:
    """One word of a command."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Option:
    """`--key value`, `--key=value` or a bare `--key`; several values stay together."""

    key: str
    """Without its dashes."""
    values: tuple[str, ...]
    line: int

    @property
    def raw(self) -> str:
        return f"--{self.key}"


@dataclass(slots=True)
class Script:
    """What a script sets and starts, in the order written."""

    directives: list[Option] = field(default_factory=list)
    """Of #SBATCH lines."""
    variables: dict[str, list[Token]] = field(default_factory=dict)
    """Name to the words of its last value."""
    exported: dict[str, Token] = field(default_factory=dict)
    """Environment: exported, or set in front of a command."""
    commands: list[list[Token]] = field(default_factory=list)
    texts: list[Token] = field(default_factory=list)
    """Every logical line, comments away: for what a grammar of commands does not see."""


def read_script(source: Source) -> Script:
    script = Script()
    words = 0
    for line, text in _logical_lines(source.lines):
        if text.startswith("#SBATCH"):
            script.directives += options(_split(text.removeprefix("#SBATCH"), line))
            continue
        script.texts.append(Token(text, line))
        if match := _ARRAY.fullmatch(text):
            tokens = list(_put_in(_tokens(match[3], line), script))
            script.variables[match[1]] = script.variables.get(match[1], []) + tokens if match[2] else tokens
            continue
        tokens = _tokens(text, line)
        words += len(tokens)
        command = list(_put_in(_assignments(tokens, script), script))
        words += len(command)
        if words > MAX_WORDS:
            break
        if command:
            script.commands.append(command)
    return script


def options(tokens: list[Token]) -> list[Option]:
    """Options of a command line, in order; words before the first option are left out."""
    found: list[Option] = []
    for token in tokens:
        text = token.text
        if text.startswith("--") and len(text) > 2:
            key, equals, value = text[2:].partition("=")
            found.append(Option(key, (value,) if equals else (), token.line))
        elif len(text) == 2 and text[0] == "-" and text[1].isalpha():
            found.append(Option(_SHORT.get(text, text[1:]), (), token.line))
        elif found:
            last = found[-1]
            found[-1] = Option(last.key, (*last.values, text), last.line)
    return found


_SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-t": "time",
    "-p": "partition",
    "-o": "output",
    "-J": "job-name",
    "-d": "dependency",
    "-a": "array",
    "-A": "account",
    "-e": "error",
    "-G": "gpus",
}
"""SLURM's short options."""


def _logical_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(first line, text) with continued lines and arrays put together; each physical line keeps a mark of its end."""
    held, start, depth = "", 0, 0
    for number, raw in enumerate(lines, start=1):
        text = raw.strip()
        if not held:
            start = number
            if not text or (text.startswith("#") and not text.startswith("#SBATCH")):
                continue
        if text.startswith("#") and held:
            text = ""
        continued = text.endswith("\\")
        piece = text[:-1] if continued else text
        if re.search(r"=\(", piece) and ")" not in piece.split("=(", 1)[1]:
            depth = 1
        elif depth and ")" in piece:
            depth = 0
        held = f"{held}\n{piece}" if held else piece
        if not continued and not depth:
            yield start, held
            held = ""
    if held:
        yield start, held


def _split(text: str, line: int) -> list[Token]:
    return [Token(word, line) for word in _words(text)]


def _tokens(text: str, start: int) -> list[Token]:
    """Words of a logical line; its pieces lie on successive physical lines."""
    return [token for offset, piece in enumerate(text.split("\n")) for token in _split(piece, start + offset)]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that closes on another line
        return text.replace('"', " ").replace("'", " ").split()


def _assignments(tokens: list[Token], script: Script) -> list[Token]:
    """Note the assignments that a line begins with, and give back the command after them.

    Before a command, or after `export`, they are environment; alone on a line they are variables of the script.
    """
    index = 0
    declares = bool(tokens) and tokens[0].text in _DECLARES
    exports = declares and tokens[0].text == "export"
    if declares:
        index = 1
        while index < len(tokens) and tokens[index].text.startswith("-"):
            index += 1
    start = index
    while index < len(tokens) and _ASSIGNMENT.fullmatch(tokens[index].text):
        index += 1
    rest = [] if declares else tokens[index:]
    for token in tokens[start:index]:
        match = _ASSIGNMENT.fullmatch(token.text)
        assert match is not None
        _assign(script, match[1], Token(match[3].removesuffix(";"), token.line), adds=bool(match[2]))
        if exports or rest or match[1] in script.exported:
            text = " ".join(word.text for word in script.variables[match[1]])
            script.exported[match[1]] = Token(text, token.line)
    return rest


def _assign(script: Script, name: str, value: Token, *, adds: bool) -> None:
    """A value that holds options is kept as words, so that `$ARGS` becomes options again."""
    tokens = list(_put_in([value], script))
    if len(tokens) == 1 and " " in tokens[0].text and "--" in tokens[0].text:
        tokens = [Token(word, value.line) for word in tokens[0].text.split()]
    script.variables[name] = script.variables.get(name, []) + tokens if adds else tokens


def _put_in(tokens: list[Token], script: Script) -> Iterator[Token]:
    """Replace variables of the script by their values; a word that is one variable becomes all its words."""
    for token in tokens:
        whole = _WHOLE_VARIABLE.fullmatch(token.text)
        if whole and whole[1] in script.variables:
            yield from script.variables[whole[1]]
        elif "$" in token.text:
            yield Token(_VARIABLE.sub(lambda match: _value(match, script), token.text)[:4096], token.line)
        else:
            yield token


def _value(match: re.Match[str], script: Script) -> str:
    words = script.variables.get(match[1])
    return match[0] if words is None else " ".join(token.text for token in words)
