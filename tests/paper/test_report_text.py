"""The report on a terminal, against golden files; WRITE_GOLDEN=1 in the environment writes them anew."""

import io
import os
from datetime import timedelta
from pathlib import Path

import pytest
import synthetic_run as synthetic
from rich.console import Console

from gatewright.report.read import read_run_folder
from gatewright.report.text import WIDTH, render_text

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = {"report": synthetic.whole_run(), "report_failed": synthetic.failed_run()}


def text_of(folder: Path) -> str:
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, record=True, legacy_windows=False)
    console.print(render_text(read_run_folder(folder, now=synthetic.BEGIN + timedelta(hours=6))))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_as_the_golden_file_says(tmp_path: Path, name: str) -> None:
    text = text_of(synthetic.write_run(tmp_path / "demo", RUNS[name]))
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_the_first_line_is_the_answer(tmp_path: Path) -> None:
    first = text_of(synthetic.write_run(tmp_path, synthetic.whole_run())).splitlines()[0]
    assert first == ("demo: finished, 120 steps in 5 min 59 s; held-out loss 2.37 → 0.836; exact match 3/64 → 41/64")


@pytest.mark.parametrize("kept", [0, 1, 4, 6, 7, 30])
@pytest.mark.parametrize(("layers", "experts"), [(12, 4), (24, 64), (30, 128), (12, 0)])
def test_any_beginning_of_any_run_fits(tmp_path: Path, kept: int, layers: int, experts: int) -> None:
    events = synthetic.whole_run(total=30, layers=layers, experts=experts)[:kept]
    lines = text_of(synthetic.write_run(tmp_path, events)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert ("Routing" in lines) == (experts > 0 and kept > 6)


def test_long_words_and_markup_of_a_run_do_no_harm(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=4)
    events.append({**events[0], "text": "[bold]not markup[/bold] " + "x" * 300})
    text = text_of(synthetic.write_run(tmp_path, events))
    assert "[bold]not markup[/bold]" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_only_the_last_best_checkpoint_is_called_so(tmp_path: Path) -> None:
    lines = text_of(synthetic.write_run(tmp_path, synthetic.whole_run())).splitlines()
    assert [line.split()[0] for line in lines if " best " in line and "checkpoints/" in line] == ["120"]


def test_what_every_prompt_begins_with_is_not_repeated(tmp_path: Path) -> None:
    events = synthetic.whole_run()
    for event in events:
        for sample in event.get("samples", []):
            sample["prompt"] = "<system>\nBe brief.\n<user>" + sample["prompt"]
    text = text_of(synthetic.write_run(tmp_path, events))
    assert "Be brief" not in text
    assert "<user>What is 12 + 30?" in text
