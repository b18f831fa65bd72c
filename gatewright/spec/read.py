"""Run files: YAML to Run and back, every mistake at once in words a person can act on."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gatewright.spec.document import BARE_WORDS, Document, Mistake, Place, Spot, Unreadable, plain_value, read_yaml
from gatewright.spec.errors import RunFileError
from gatewright.spec.keys import nearest, run_keys, suggest
from gatewright.spec.mistakes import bare_word_mistakes, describe, validation_mistakes
from gatewright.spec.run import Run
from gatewright.spec.schema import run_schema

MAX_BYTES = 2**20
MAX_MISTAKES = 20
FIRST_OVERRIDE = 2**32
"""Order of the first override among places: after every line of a file."""


def read_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run file, put `section.key=value` overrides over it, and check the result.

    Paths in the file stay as they are written: they are relative to the current directory.
    Raises RunFileError, whose text lists every mistake with its line, what was got and what is wanted.
    """
    written = read_yaml(_file_text(path), lambda line: Place(line, f"{path}:{line}"))
    written.spots[()] = Spot(Place(0, f"{path}"))
    if not isinstance(written.value, dict):
        got = "is empty" if written.value is None else f"holds {describe(written.value)}"
        raise RunFileError(f"{path} {got}; wanted sections such as run:, model:, data: and train:")
    for number, override in enumerate(overrides):
        _apply(override, written, Place(FIRST_OVERRIDE + number, f"--set {override}"))
    mistakes = written.mistakes
    try:
        run = Run.model_validate(written.value)
    except ValidationError as error:
        mistakes += validation_mistakes(error, written)
    mistakes += bare_word_mistakes(written, {mistake.key for mistake in mistakes})
    if mistakes:
        raise RunFileError(_listing(path, sorted(mistakes)))
    return run


def dump_run(run: Run) -> str:
    """The run with every default filled in, as YAML in declared order; reads back as the same run."""
    return yaml.dump(
        run.model_dump(mode="json"), Dumper=_RunDumper, sort_keys=False, allow_unicode=True, width=float("inf")
    )


def diff_runs(a: Run, b: Run) -> list[tuple[str, object, object]]:
    """(dotted key, value in a, value in b) for every key in which two runs differ, in declared order."""
    return list(_differences("", a.model_dump(mode="json"), b.model_dump(mode="json")))


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a run file, for editors; descriptions are the docs of the keys."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **run_schema(),
        "title": "Gatewright run file",
    }


# --- the file -------------------------------------------------------------------------------------------------


def _file_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such file{_nearest_file(path)}") from None
    except IsADirectoryError:
        inside = [entry.name for entry in sorted(path.glob("*.y*ml"))[:3]]
        hint = f"; it holds {', '.join(inside)}" if inside else ""
        raise RunFileError(f"{path} is a folder; wanted a run file (YAML){hint}") from None
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise RunFileError(f"{path} is larger than 1 MiB; a run file is a page of YAML. Is this the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RunFileError(
            f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the run file as UTF-8 text"
        ) from None


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (nor a folder {folder})"
    files = {entry.stem: entry for entry in islice(folder.iterdir(), 1000) if entry.suffix in {".yaml", ".yml"}}
    found = nearest(path.stem, files)
    return f"; did you mean {files[found]}?" if found else ""


# --- overrides ------------------------------------------------------------------------------------------------


def _apply(override: str, written: Document, place: Place) -> None:
    """Put one `section.key=value` into the document, or note the mistake in it."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not name:
        written.mistakes.append(Mistake(place, "", "wanted section.key=value, such as --set train.lr=1e-4"))
        return
    if name not in run_keys() or name.endswith("*"):
        written.mistakes.append(Mistake(place, "", _unknown_override(name)))
        return
    try:
        value = read_yaml(text, lambda _: place)
    except Unreadable as error:
        sentence, _, _excerpt = error.mistake.text.partition("\n")
        written.mistakes.append(Mistake(place, "", sentence))
        return
    written.mistakes += value.mistakes
    *sections, leaf = path = tuple(name.split("."))
    parent: Any = written.value
    for depth, section in enumerate(sections, start=1):
        if not isinstance(parent.get(section), dict):
            parent[section] = {}
            written.spots[path[:depth]] = Spot(place)
        parent = parent[section]
    parent[leaf] = value.value
    for spot in [spot for spot in written.spots if spot[: len(path)] == path]:
        del written.spots[spot]
    written.spots |= {(*path, *below): spot for below, spot in value.spots.items()}
    written.spots.setdefault(path, Spot(place, "", False))


def _unknown_override(name: str) -> str:
    """Help with a path that is not in the table, at the first of its parts that is unknown."""
    keys = run_keys()
    section = ""
    for part in name.split("."):
        below = f"{section}.{part}" if section else part
        if below not in keys or part in {"", "*"}:
            break
        section = below
    if section and not keys[section].keys:
        return f"{section} is no section; set it whole, wanted {keys[section].wanted}"
    return suggest(section, part)[0]


def _listing(path: Path, mistakes: Sequence[Mistake]) -> str:
    lines = [str(mistake) for mistake in mistakes[:MAX_MISTAKES]]
    if len(mistakes) == 1:
        return lines[0]
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"... and {len(mistakes) - MAX_MISTAKES} more")
    return "\n  ".join([f"{len(mistakes)} mistakes in {path}:", *lines])


# --- writing --------------------------------------------------------------------------------------------------


class _RunDumper(yaml.SafeDumper):
    """Sections as blocks, lists in brackets, and quotes around each text that would read back as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text_node(dumper: _RunDumper, text: str) -> yaml.Node:
    quotes = "'" if plain_value(text) != text or text.lower() in BARE_WORDS else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


def _list_node(dumper: _RunDumper, items: list[object]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_RunDumper.add_representer(str, _text_node)
_RunDumper.add_representer(list, _list_node)


def _differences(path: str, a: object, b: object) -> Iterator[tuple[str, object, object]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys([*a, *b]):
            yield from _differences(f"{path}.{name}" if path else name, a.get(name), b.get(name))
    elif a != b:
        yield path, a, b
