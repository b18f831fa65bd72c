"""Edits as unified diffs of the user's own files, and applied, with a copy of what was there."""

import difflib
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from gatewright.preflight.check import Repair, Verdict
from gatewright.preflight.fault import Edit
from gatewright.preflight.source import Source, hide
from gatewright.spec.errors import UserError

_SHORT = {
    "nodes": "N",
    "ntasks": "n",
    "cpus-per-task": "c",
    "time": "t",
    "partition": "p",
    "output": "o",
    "dependency": "d",
    "array": "a",
}
_VALUE = r"""("[^"\n]*"|'[^'\n]*'|\[[^\]\n]*\]|(?:\$\{[^}\n]*\}|[^\s,#}\\])+)"""


def diff(source: Source, edits: Iterable[Edit]) -> str:
    """The edits of one file as a unified diff; empty where none can be made in its text."""
    new = edited(source, edits)
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        new.splitlines(keepends=True),
        fromfile=source.name,
        tofile=source.name,
        n=1,
    )
    return hide("".join(line if line.endswith("\n") else f"{line}\n" for line in lines))


def diffs(verdict: Verdict, repairs: Sequence[Repair]) -> dict[str, str]:
    """Diff by file, of these repairs together."""
    by_file = {source.name: source for source in verdict.sources}
    found = {}
    for name, source in by_file.items():
        text = diff(source, [repair.edit for repair in repairs if repair.edit.at.file == name])
        if text:
            found[name] = text
    return found


def safe_repairs(verdict: Verdict) -> tuple[Repair, ...]:
    return tuple(repair for repair in verdict.repairs if repair.safe)


def apply_safe(verdict: Verdict) -> list[tuple[str, Path]]:
    """Write the safe repairs; (file, copy of what it was) for each file changed. Raises UserError on a full disk and
    where a file has changed since it was read."""
    changed = []
    for source in verdict.sources:
        edits = [repair.edit for repair in safe_repairs(verdict) if repair.edit.at.file == source.name]
        new = edited(source, edits)
        if new == source.text:
            continue
        copy = free_name(source.path)
        part = source.path.with_name(f"{source.path.name}.part")
        try:
            if source.path.read_text(encoding="utf-8-sig").replace("\r\n", "\n") != source.text:
                raise UserError(f"{source.name} has changed since it was read; check it again")
            shutil.copy2(source.path, copy)
            part.write_text(new, encoding="utf-8")
            shutil.copymode(source.path, part)
            part.replace(source.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UserError(f"{source.name}: cannot be written: {error.strerror}") from None
        changed.append((source.name, copy))
    return changed


def free_name(path: Path) -> Path:
    """path.orig, or path.orig.1 and so on: no copy is written over."""
    copy, number = path.with_name(f"{path.name}.orig"), 0
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.orig.{number}")
    return copy


def edited(source: Source, edits: Iterable[Edit]) -> str:
    """The text with the edits made, from the last line to the first; an edit whose spot is not plain is left out."""
    lines = source.text.split("\n")
    unique = {(edit.at.line, edit.at.key, edit.action): edit for edit in edits}
    for edit in sorted(unique.values(), key=lambda edit: -edit.at.line):
        index = edit.at.line - 1
        if not 0 <= index < len(lines):
            continue
        new = _line(lines[index], edit)
        if new is not None:
            lines[index : index + 1] = new
    return "\n".join(lines)


def _line(line: str, edit: Edit) -> list[str] | None:
    key = edit.at.key.rpartition(".")[2].lstrip("-").rstrip("=")
    name = "[-_]".join(map(re.escape, re.split("[-_]", key)))
    short = f"|(?<=\\s)-{_SHORT[key]}" if key in _SHORT else ""
    mapping = re.compile(rf"""^(\s*(?:-\s+)?["']?{name}["']?\s*:\s*|.*?[{{,]\s*["']?{name}["']?\s*:\s*){_VALUE}""")
    option = re.compile(rf"(.*?(?:--{name}{short})[ =]+){_VALUE}")
    assignment = re.compile(rf"(.*?\b{name}=+){_VALUE}")
    match = mapping.match(line) or option.match(line) or assignment.match(line)
    if edit.action == "set":
        return [f"{match[1]}{_quoted(edit, match[2])}{line[match.end() :]}"] if match else None
    if edit.action == "add":
        if re.match(rf"\s*{name}\s*:", line) or line.startswith("#SBATCH"):
            return [line[: len(line) - len(line.lstrip())] + edit.text, line]
        return None
    return _dropped(line, name, match)


def _dropped(line: str, name: str, match: re.Match[str] | None) -> list[str] | None:
    """The line without the setting: nothing where it was alone on it."""
    if re.fullmatch(rf"\s*{name}\s*:\s*[^\s\[{{|>&].*", line) or re.fullmatch(rf"\s*(export\s+)?{name}=\S+\s*", line):
        return []
    if re.fullmatch(rf"#SBATCH\s+--{name}\S*(\s+\S+)?\s*", line):
        return []
    if re.search(rf"--{name}\b", line):
        without = re.sub(rf"\s*--{name}(?:[ =]+(?!--)(?!\\)\S+)?", "", line, count=1)
        return [] if without.strip() in ("", "\\") else [without]
    return None


def _quoted(edit: Edit, old: str) -> str:
    """In the quotes that were there, or that JSON wants."""
    quote = old[0] if old[:1] in "\"'" else ""
    if edit.at.file.endswith(".json") and not re.fullmatch(r"-?[\d.]+(e-?\d+)?|true|false|null", edit.text):
        quote = '"'
    return f"{quote}{edit.text}{quote}"
