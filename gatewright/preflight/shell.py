"""A shell script as settings and commands: #SBATCH lines, assignments and what is started, each word with its line."""

import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from gatewright.preflight.source import Source

MAX_QUOTED_LINES = 100
MAX_WORDS = 20_000
"""Of a script, variables put in; a script that grows beyond is not read further."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_ARRAY = re.compile(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=\((.*)\)\s*;?", re.S)
_SEPARATORS = frozenset({"&&", "||", "|", ";", "&", "then", "do"})
_DECLARES = frozenset({"export", "declare", "local", "readonly"})
_COMMENT = re.compile(r"""^((?:[^"'#]|"[^"]*"|'[^']*'|(?<!\s)#)*?)\s#.*$""")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<<?-?|<<<)(&?\S*)")
_HERE = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")
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
            script.directives += options(words_of(text.removeprefix("#SBATCH"), line))
            continue
        script.texts.append(Token(text, line))
        if match := _ARRAY.fullmatch(text):
            _keep(script, match[1], list(_put_in(words_of(match[3], line), script)), adds=bool(match[2]))
            continue
        tokens = _unwrapped(words_of(text, line))
        words += len(tokens)
        for part in split_commands(tokens):
            command = list(_put_in(_assignments(part, script), script))
            words += len(command)
            if command and words <= MAX_WORDS:
                script.commands.append(command)
        if words > MAX_WORDS:
            break
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
    """(first line, text): continued lines, arrays and quoted texts put together; no comments, no here-documents."""
    held, start, depth, end = "", 0, 0, ""
    for number, raw in enumerate(lines, start=1):
        text = raw.strip()
        if end:
            end = "" if text == end else end
            continue
        if not held:
            start = number
            if not text or (text.startswith("#") and not text.startswith("#SBATCH")):
                continue
        text = _COMMENT.sub(r"\1", text)
        continued = text.endswith("\\")
        piece = text[:-1] if continued else text
        if re.search(r"=\(", piece) and ")" not in piece.split("=(", 1)[1]:
            depth = 1
        elif depth and ")" in piece:
            depth = 0
        held = f"{held}\n{piece}" if held else piece
        open_quote = number - start < MAX_QUOTED_LINES and _open_quote(held)
        if not continued and not depth and not open_quote:
            yield start, held
            if match := _HERE.search(held):
                end = match[1]
            held = ""
    if held:
        yield start, held


def _open_quote(text: str) -> bool:
    """A quote is not closed yet."""
    if text.count('"') % 2 == 0 and text.count("'") % 2 == 0:
        return False
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def split_commands(tokens: list[Token]) -> Iterator[list[Token]]:
    """Commands between `&&`, `||`, `|`, `;` and `&`, without their redirections."""
    command: list[Token] = []
    to_file = False
    for token in tokens:
        if to_file:
            to_file = False
        elif match := _REDIRECTION.fullmatch(token.text):
            to_file = not match[1]
        elif token.text in _SEPARATORS:
            if command:
                yield command
            command = []
        elif token.text.endswith(";"):
            yield [*command, Token(token.text[:-1], token.line)]
            command = []
        else:
            command.append(token)
    if command:
        yield command


def words_of(text: str, line: int) -> list[Token]:
    """Words as a POSIX shell splits them, each with its line; the text begins on line `line`."""
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[Token] = []
    seen, at = 0, line
    try:
        while (word := lexer.get_token()) is not None:
            end = max(seen, stream.tell() - 1)
            at, seen = at + text.count("\n", seen, end), end
            found.append(Token(word, max(line, at - word.count("\n"))))
    except ValueError:  # a quote that never closes
        return [Token(word, line) for word in text.replace('"', " ").replace("'", " ").split()]
    return found


def _unwrapped(tokens: list[Token]) -> list[Token]:
    """`bash -c "…"` as the words of its text, so that what a container runs is read like any command."""
    for index in range(len(tokens) - 2):
        name = tokens[index].text.rpartition("/")[2]
        if name in ("bash", "sh") and tokens[index + 1].text in ("-c", "-lc"):
            inside = tokens[index + 2]
            return [*tokens[:index], *words_of(inside.text, inside.line), *tokens[index + 3 :]]
    return tokens


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
    if len(tokens) == 1 and re.search(r"\s", tokens[0].text) and "--" in tokens[0].text:
        tokens = words_of(tokens[0].text, value.line)
    _keep(script, name, tokens, adds=adds)


def _keep(script: Script, name: str, tokens: list[Token], *, adds: bool) -> None:
    held = script.variables.get(name, []) if adds else []
    script.variables[name] = [*held, *tokens][:MAX_WORDS]


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
