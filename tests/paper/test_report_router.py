"""The report's account of the router: its health then and now, and what the guard did; a rollback voids steps."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console
from test_report_read import Events, Restarted, read, steps_of

from gatewright.report.html import render_html
from gatewright.report.text import WIDTH, render_text


def look(log: Restarted, step: int, *, kl: float, dead: int = 0) -> dict[str, Any]:
    lists = {"load_cv": 0.5, "max_violation": 1.0, "effective_experts": 0.9, "starved": dead + 1, "token_entropy": 0.7}
    lists |= {"top1": 0.4, "margin": 0.1, "lse2": 5.0, "drift": kl / 10, "overlap": 1 - kl, "kl": kl, "dead": dead}
    return log.clock.event(
        "router_health", 0, step=step, tokens=4096, seconds=0.1, **{name: [value] * 3 for name, value in lists.items()}
    )


def rolled_back(log: Restarted) -> Events:
    reasons = ["3 experts that had tokens at step 0 have none (limit 1): 3 in layer 2"]
    return [
        *log.first[:6],
        look(log, 0, kl=0.0),
        *log.first[6:],
        look(log, 30, kl=0.6, dead=1),
        log.clock.event(
            "guard", 0, step=30, level="red", reasons=reasons, action="rollback", detail="back to step 20",
            resumed_step=20,
        ),
        *log.steps(21, 40),
        look(log, 40, kl=0.1),
    ]  # fmt: skip


def test_a_rollback_voids_the_steps_and_the_look_it_undid(tmp_path: Path) -> None:
    log = Restarted(resumed=None)
    events = rolled_back(log)
    report = read(tmp_path, events)
    assert len(steps_of(events)) == 50 and report.totals.steps == 40 and report.void_steps == 10
    assert [one.step for one in report.looks] == [0, 40]
    assert report.restarts == (20,)
    assert [acted.action for acted in report.guard] == ["rollback"]


def test_text_and_page_tell_the_same(tmp_path: Path) -> None:
    report = read(tmp_path, rolled_back(Restarted(resumed=None)))
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(render_text(report))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    for words in (
        "Router, on a fixed probe",
        "choices as at step 0",
        "90.0 %",
        "step 30",
        "rollback",
        "back to step 20",
    ):
        assert words in text
    page = render_html(report)
    for words in ("Distance from step 0", "Starved experts", "90.0 %", "3 experts that had tokens"):
        assert words in page


def test_a_dense_run_has_no_router_section(tmp_path: Path) -> None:
    report = read(tmp_path, Restarted(resumed=None).first)
    assert "fixed probe" not in render_html(report)
