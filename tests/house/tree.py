"""The tree of the package for the README: every file and the first sentence of its docstring.

`python tests/house/tree.py` prints it; with `--write` it is put between the README's markers.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gatewright"
BEGIN, END = "<!-- tree -->", "<!-- /tree -->"


def sources() -> list[Path]:
    """Python files of the package, a folder's files before its folders; without the empty `__init__.py`."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
    return sorted(files, key=lambda file: (file.parent != PACKAGE, file.relative_to(PACKAGE).parts))


def role(file: Path) -> str:
    """First paragraph of the file's docstring, on one line; empty if there is none."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def render_tree() -> str:
    """The tree as indented text, names padded to one column."""
    width = max(len(file.name) for file in sources()) + 4
    lines = ["gatewright/"]
    folder = PACKAGE
    for file in sources():
        if file.parent != folder:
            folder = file.parent
            lines.append(f"  {folder.relative_to(PACKAGE)}/")
        indent = "  " if folder == PACKAGE else "    "
        lines.append(f"{(indent + file.name).ljust(width)}  {role(file)}")
    return "\n".join(lines)


def readme_with(tree: str, readme: str) -> str:
    """The README's text with the tree between its markers. Raises ValueError if it has no such pair."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{begin}\n```\n{tree}\n```\n{end}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    if sys.argv[1:] == ["--write"]:
        page.write_text(readme_with(render_tree(), page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(render_tree())
