"""What is written about the house is true of it: the README's tree and commands, the dependencies, the changelog."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import typer
from tree import PACKAGE, ROOT, readme_with, render_tree

from gatewright import __version__
from gatewright.cli import EXTRAS, app

VERBS = {"train", "plan", "report", "data inspect", "schema", "models", "gpus", "check", "doctor", "probe"} | {
    *("export", "verify"),
    *("submit", "status", "list", "logs", "cancel", "cluster show"),
    "data schedule",
    *("checkpoint list", "checkpoint verify", "checkpoint consolidate"),
    *("router measure", "router capacity", "router placement"),
}
"""Every verb. A new one is a promise to users: it is written here, in the README and in the changelog."""


KNOWN_AS = {"yaml": "pyyaml", "pydantic_core": "pydantic", "PIL": "pillow", "llama_cpp": "llama-cpp-python"}
"""Packages whose distribution has another name."""
FOUND_BY_PATH = {"conversion"}
"""llama.cpp's converter, which runs in a process of its own with the folder that the user named."""


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def verbs(command: object, prefix: str = "") -> Iterator[str]:
    for name, below in command.commands.items():
        if "commands" in vars(below):
            yield from verbs(below, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def test_the_command_line_has_the_documented_verbs_and_no_others() -> None:
    assert set(verbs(typer.main.get_command(app))) == VERBS


def test_the_readme_shows_every_verb() -> None:
    readme = read("README.md")
    assert [verb for verb in sorted(VERBS) if f"gatewright {verb}" not in readme] == []


def test_the_changelog_names_every_verb_and_the_version() -> None:
    changelog = read("CHANGELOG.md")
    assert [verb for verb in sorted(VERBS) if f"gatewright {verb}" not in changelog] == []
    assert re.search(rf"^## \[{re.escape(__version__)}\]", changelog, flags=re.MULTILINE)


def test_the_readme_has_the_tree_of_the_package() -> None:
    """`python tests/house/tree.py --write` (or `make format`) brings it up to date."""
    readme = read("README.md")
    assert readme == readme_with(render_tree(), readme)


def test_every_dependency_is_explained_and_nothing_else_is() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    required = {"": project["dependencies"], **project["optional-dependencies"]}
    explained: dict[str, set[str]] = {}
    for part in re.split(r"^## ", read("docs/dependencies.md"), flags=re.MULTILINE)[1:]:
        extra = re.match(r"Extra `(\w+)`", part)
        explained[extra.group(1) if extra else ""] = set(re.findall(r"^\| `([\w-]+)` \|", part, flags=re.MULTILINE))
    assert explained == {extra: {re.match(r"[\w-]+", line)[0] for line in lines} for extra, lines in required.items()}


def imported(folder: Path) -> set[str]:
    """Distributions that the files below a folder import, by name; not the standard library, nor ourselves."""
    names: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
    return {KNOWN_AS.get(name, name) for name in names - set(sys.stdlib_module_names) - FOUND_BY_PATH - {"gatewright"}}


def test_every_package_that_is_imported_is_declared() -> None:
    """Not left to what another dependency happens to bring; and the paper half needs no extra."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    always = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert imported(PACKAGE) <= always | {KNOWN_AS.get(package, package) for package in EXTRAS}
    for folder in ("spec", "packing", "router", "planner", "report"):
        assert imported(PACKAGE / folder) <= always


def test_every_package_that_an_extra_brings_has_a_sentence_when_it_is_missing() -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = {re.match(r"[\w-]+", line)[0] for line in extras[extra]}
        assert KNOWN_AS.get(package, package) in names, (package, extra)
    for extra in ("train", "quantize", "export", "synth"):
        for line in extras[extra]:
            package = re.match(r"[\w-]+", line)[0]
            module = next((name for name, known in KNOWN_AS.items() if known == package), package.replace("-", "_"))
            assert EXTRAS[module] == extra
