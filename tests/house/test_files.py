"""Every file keeps the house's conventions: a role in one sentence, a modest size, a telling name, imports on top."""

import ast
from pathlib import Path

import pytest
from tree import PACKAGE, ROOT, role

MAX_LINES = 400
DRAWERS = {"utils.py", "util.py", "common.py", "helpers.py", "base.py", "misc.py"}
COMMAND_LINE = tuple(
    PACKAGE / f"{name}.py"
    for name in (
        *("cli", "cli_campaign", "cli_check", "cli_checkpoint", "cli_data", "cli_export", "cli_parity", "cli_plan"),
        *("cli_probe", "cli_router", "cli_train"),
    )
)
"""Where a verb imports its part of the house when it is called."""
HOMES = ("gatewright", "examples", "benchmarks", "tests")

FILES = sorted(
    file
    for home in HOMES
    for file in (ROOT / home).rglob("*.py")
    if "cache" not in file.parts and file.name != "__init__.py"
)


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_file_says_its_role_in_one_sentence_and_fits_in_400_lines(file: Path) -> None:
    assert role(file).endswith("."), "the docstring at the top does not begin with a sentence"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_file_is_a_drawer_for_anything() -> None:
    assert {name(file) for file in FILES if file.name in DRAWERS} == set()


def test_init_files_are_empty() -> None:
    """Nothing is imported, or hidden, by importing a folder. The top one holds the version."""
    full = [file for file in PACKAGE.rglob("__init__.py") if file.parent != PACKAGE and file.read_text().strip()]
    assert [name(file) for file in full] == []


def test_every_folder_is_a_package() -> None:
    """setuptools would leave a folder without `__init__.py` out of the wheel."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [name(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def imports_inside_functions(file: Path) -> list[int]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {node for function in functions for node in ast.walk(function)}
    return sorted(node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom))


def test_only_the_command_line_imports_inside_functions() -> None:
    """Elsewhere such an import hides a direction from the reader, and moves its failure into the middle of a run."""
    found = {
        name(file): lines
        for file in PACKAGE.rglob("*.py")
        if file not in COMMAND_LINE and (lines := imports_inside_functions(file))
    }
    assert found == {}


def test_the_search_for_inner_imports_finds_those_of_the_command_line() -> None:
    assert len(imports_inside_functions(PACKAGE / "cli.py")) > 3
