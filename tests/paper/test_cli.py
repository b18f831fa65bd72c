"""The command line as a person uses it: what it prints, where, and with which exit code."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from synthetic_run import whole_run, write_run

from gatewright import __version__
from gatewright.cli import main

RUN = "run: demo\nmodel: {path: m}\ndata: {train: d}\ntrain: {tokens_per_step: 8, steps: 1, lr: 1e-3}\n"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: object
    out: str
    err: str


class Shell:
    """Runs the command line in this process, in an empty folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        for name, value in {"COLUMNS": "100", "NO_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["gatewright", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = self.capsys.readouterr()
        return Done(end.value.code or 0, captured.out, captured.err)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def break_down(statement: str, **environment: str) -> Done:
    """Run, in a process of its own, a command line with one more verb, which executes the statement."""
    program = (
        "import sys, typer\nfrom gatewright import cli\nfrom gatewright.spec.errors import Diverged\n"
        f"@cli.app.command()\ndef broken() -> None:\n    {statement}\n"
        "sys.argv = ['gatewright', 'broken']\ncli.main()"
    )
    env = os.environ | {"NO_COLOR": "1"} | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    return Done(done.returncode, done.stdout, done.stderr)


def test_without_arguments_it_shows_its_verbs(shell: Shell) -> None:
    done = shell()
    assert done.code == 2
    assert {"train", "report", "data", "schema"} <= set((done.out + done.err).split())


def test_it_runs_as_a_module_too(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gatewright", "--version"], capture_output=True, text=True, cwd=shell.folder
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gatewright {__version__}\n", "")


def test_the_schema_is_json_on_standard_output(shell: Shell) -> None:
    done = shell("schema")
    assert done.code == 0
    assert json.loads(done.out)["title"] == "Gatewright run file"


def test_a_wrong_run_file_ends_with_code_2_and_nothing_written(shell: Shell) -> None:
    (shell.folder / "run.yaml").write_text(RUN + "lr: 3\n")
    done = shell("train", "run.yaml", "--set", "train.lrr=1", "--set", "data.pack=false")
    assert done.code == 2
    assert done.out == ""
    assert done.err == (
        "error: 2 mistakes in run.yaml:\n"
        "  run.yaml:5: lr: unknown key here; did you mean train.lr?\n"
        "  --set train.lrr=1: unknown key; did you mean lr?\n"
    )
    assert [path.name for path in shell.folder.iterdir()] == ["run.yaml"]


def test_a_long_line_of_an_error_is_not_broken(shell: Shell) -> None:
    done = shell("train", "a" * 200)
    assert done.err == f"error: {'a' * 200}: no such file\n"


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["train"], ["train", "a", "b"], ["report", "--html"], ["data", "inspect", "f"], ["--nothing"]],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_code_2(shell: Shell, arguments: list[str]) -> None:
    done = shell(*arguments)
    assert done.code == 2
    assert "─ Error ─" in done.err


@pytest.mark.parametrize("named", ["demo", "runs/demo", "demo.yaml"])
def test_a_report_is_found_by_name_by_folder_and_by_run_file(shell: Shell, named: str) -> None:
    write_run(shell.folder / "runs" / "demo", whole_run(total=12))
    (shell.folder / "demo.yaml").write_text(RUN)
    done = shell("report", named)
    assert done.code == 0, done.err
    assert done.out.endswith("Page: runs/demo/report.html\n")
    assert (shell.folder / "runs/demo/report.html").read_text().startswith("<!doctype html>")
    assert not list(shell.folder.rglob("*.part"))


def test_a_folder_that_is_no_run_does_not_hide_the_run_of_its_name(shell: Shell) -> None:
    write_run(shell.folder / "runs" / "demo", whole_run(total=12))
    (shell.folder / "demo").mkdir()
    assert shell("report", "demo").out.endswith("Page: runs/demo/report.html\n")


def test_the_page_goes_where_it_is_asked_for_or_nowhere(shell: Shell) -> None:
    folder = write_run(shell.folder / "runs" / "demo", whole_run(total=12))
    before = sorted(folder.iterdir())
    assert shell("report", "demo", "--no-html").code == 0
    assert shell("report", "demo", "--html", "page.html").code == 0
    assert sorted(folder.iterdir()) == before
    assert (shell.folder / "page.html").is_file()


def test_a_page_that_cannot_be_written_is_the_users_to_place(shell: Shell) -> None:
    write_run(shell.folder / "runs" / "demo", whole_run(total=12))
    done = shell("report", "demo", "--html", "no/page.html")
    assert done.code == 2
    assert done.err == "error: no/page.html: cannot be written: No such file or directory; choose another --html\n"
    assert shell("report", "demo", "--html", ".").code == 2
    assert not list(shell.folder.rglob("*.part"))


def test_no_such_run_ends_with_code_2(shell: Shell) -> None:
    done = shell("report", "nothing")
    assert done.code == 2
    assert done.err.startswith("error: no run to report in runs/nothing")


def test_a_reader_that_leaves_early_causes_no_traceback(shell: Shell) -> None:
    code = f"{sys.executable} -m gatewright schema | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=shell.folder, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


# --- how a verb that breaks ends ------------------------------------------------------------------------------


def test_a_run_that_fails_ends_with_code_1_and_its_sentence_alone() -> None:
    assert break_down("raise Diverged('loss [red]is nan')") == Done(1, "", "error: loss [red]is nan\n")


def test_the_traceback_of_an_error_is_shown_on_request() -> None:
    done = break_down("raise Diverged('loss is nan')", GATEWRIGHT_DEBUG="1")
    assert done.code == 1
    assert done.err.startswith("Traceback")
    assert done.err.endswith("error: loss is nan\n")


@pytest.mark.parametrize(
    ("bug", "told"),
    [
        ("raise RuntimeError('oops')", "RuntimeError: oops"),
        ("import a_package_that_nobody_has", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
    ],
)
def test_a_bug_shows_its_traceback_and_asks_for_a_report(bug: str, told: str) -> None:
    done = break_down(bug)
    assert done.code == 1
    assert done.err.startswith("Traceback")
    assert told in done.err
    assert done.err.splitlines()[-1].startswith("error: this is a bug in Gatewright, not a mistake of yours.")


def test_an_interrupt_ends_with_code_130_and_no_traceback() -> None:
    done = break_down("raise KeyboardInterrupt")
    assert done.code == 130
    assert "Traceback" not in done.err


def test_the_exit_code_of_a_verb_is_that_of_the_process() -> None:
    assert break_down("raise typer.Exit(7)").code == 7
