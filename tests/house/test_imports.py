"""What is loaded, and when: paper without the extras, `--help` without anything heavy."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tree import PACKAGE, ROOT

PAPER_AND_WAIST = ("campaign", "doctor", "packing", "planner", "preflight", "report", "router", "spec")
EXTRAS = ("torch", "transformers", "peft", "safetensors", "tokenizers", "pyarrow", "jinja2", "gguf", "openai")

REFUSE = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""
"""A bare install, as far as imports can tell."""


def python(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=120)


def existing(folders: tuple[str, ...]) -> list[str]:
    return [folder for folder in folders if (PACKAGE / folder).is_dir()]


def modules(folder: str) -> list[str]:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


@pytest.mark.parametrize("folder", existing(PAPER_AND_WAIST))
def test_a_bare_install_imports_every_module_of_the_paper_half(folder: str) -> None:
    done = python(REFUSE + "".join(f"import {module}\n" for module in modules(folder)))
    assert done.returncode == 0, done.stderr


def test_without_the_extra_training_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "run: a\nmodel: {path: m}\ndata: {train: d}\ntrain: {tokens_per_step: 8, steps: 1, lr: 1e-3}\n"
    )
    code = "sys.argv = ['gatewright', 'train', 'run.yaml']\nfrom gatewright.cli import main\nmain()"
    done = python(REFUSE + code, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("error: this needs ")
    assert 'pip install "gatewright[train]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"numpy", "yaml", "pydantic", *EXTRAS}),
        (["--version"], {"numpy", "yaml", "pydantic", *EXTRAS}),
        (["train", "--help"], {"numpy", "yaml", *EXTRAS}),  # typer reads arguments with pydantic
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str], heavy: set[str]) -> None:
    done = python(
        f"import sys\nsys.argv = ['gatewright', *{arguments}]\nfrom gatewright.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert "typer" in loaded
    assert loaded & heavy == set()


def test_the_contract_on_extras_names_every_folder_of_paper_and_waist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (without_extras,) = [contract for contract in contracts if contract["type"] == "forbidden"]
    assert set(without_extras["source_modules"]) == {f"gatewright.{folder}" for folder in existing(PAPER_AND_WAIST)}
