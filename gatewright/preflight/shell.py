"""A shell script as settings and commands: #SBATCH lines, assignments and what is started, each word with its line."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from gatewright.preflight.source import Source

MAX_WORDS = 20_000
"""Of a script, variables put in; a script that grows beyond is not read further."""
_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.S)
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
        if match := _ASSIGNMENT.fullmatch(text):
            _assign(script, match, line, exported=text.startswith("export"))
            continue
        command = list(_put_in(_tokens(text, line), script))
        words += len(command)
        if words > MAX_WORDS:
            break
        while command and (match := _ASSIGNMENT.fullmatch(command[0].text)):
            script.exported[match[1]] = Token(match[3], command.pop(0).line)
        if command and command[0].text == "export":
            for token in command[1:]:
                if match := _ASSIGNMENT.fullmatch(token.text):
                    script.exported[match[1]] = Token(match[3], token.line)
            continue
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


def _assign(script: Script, match: re.Match[str], line: int, *, exported: bool) -> None:
    name, adds, value = match[1], match[2], match[3].strip()
    if value.startswith("("):
        value = value[1:].removesuffix(")")
    value = value.removesuffix(";")
    tokens = list(_put_in(_tokens(value, line), script))
    if not value.startswith("(") and len(tokens) == 1 and " " in tokens[0].text and "--" in tokens[0].text:
        tokens = [Token(word, line) for word in tokens[0].text.split()]
    script.variables[name] = script.variables.get(name, []) + tokens if adds else tokens
    text = " ".join(token.text for token in tokens)
    if exported or name in script.exported:
        script.exported[name] = Token(text, line)


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
