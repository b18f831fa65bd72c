"""Campaigns on a terminal: a table with bars, one stage a line, and the lives of one campaign in full."""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gatewright.campaign.status import CampaignStatus, StageStatus, totals
from gatewright.report.units import duration
from gatewright.spec.campaign import Life

BAR = 12
COLOURS = {
    "done": "green",
    "running": "cyan",
    "queued": "blue",
    "waiting": "dim",
    "ready": "yellow",
    "halted": "red",
}


def render_table(statuses: Sequence[CampaignStatus]) -> RenderableType:
    """Every stage of every campaign, and what all of them cost."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("campaign", "stage", "state", "progress"):
        table.add_column(name, no_wrap=True)
    for name in ("eta", "links", "saved", "loss", "GPU-h", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for status in statuses:
        for number, stage in enumerate(status.stages):
            table.add_row(status.name if number == 0 else "", *_cells(stage))
    gpu_hours, usd = totals(statuses)
    cost = f", {dollars(usd)}" if usd is not None else ""
    return Group(table, Text(f"{gpu_hours:,.1f} GPU-hours so far{cost}", style="dim"))


def _cells(stage: StageStatus) -> list[RenderableType]:
    notes = "; ".join(filter(None, (stage.health, stage.detail.splitlines()[0] if stage.detail else "")))
    return [
        stage.name,
        Text(stage.state, style=COLOURS.get(stage.state, "")),
        bar(stage.step, stage.steps),
        "" if stage.remaining_s is None else duration(stage.remaining_s),
        f"{stage.links_used}/{stage.links}",
        "" if stage.checkpoint is None else f"{stage.checkpoint:,}",
        "" if stage.loss is None else f"{stage.loss:.4f}",
        f"{stage.gpu_hours:,.1f}",
        "" if stage.usd is None else dollars(stage.usd),
        notes,
    ]


def bar(step: int, steps: int) -> Text:
    """`━━━━━━──────  1,200/2,400`; empty before the run has said how long it is."""
    if not steps:
        return Text("")
    full = min(BAR, step * BAR // steps)
    return Text.assemble(("━" * full, "green"), ("─" * (BAR - full), "dim"), f" {step:,}/{steps:,}")


def render_campaign(status: CampaignStatus) -> RenderableType:
    """The table, every start of every job, and the reasons why stages halted."""
    parts: list[RenderableType] = [render_table([status])]
    for stage in status.stages:
        if stage.lives:
            parts += ["", Text(f"{stage.name}: every start of a job", style="bold"), _lives(stage.lives)]
        if stage.state == "halted":
            parts += ["", Text(f"{stage.name} halted: {stage.detail}", style="red")]
    return Group(*parts)


def _lives(lives: Sequence[Life]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "began", "for", "steps", "saved", "outcome"):
        table.add_column(name, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for life in lives:
        table.add_row(
            life.job + (f" (start {life.restart + 1})" if life.restart else ""),
            time.strftime("%d %b %H:%M:%S", time.localtime(life.started)),
            "" if life.ended is None else duration(life.ended - life.started),
            "" if life.first_step is None else f"{life.first_step:,}–{life.last_step:,}",
            "" if life.checkpoint_after is None else f"{life.checkpoint_after:,}",
            life.outcome or "working",
            "; ".join((life.reason.splitlines() or [""])[:1] + list(life.notes)),
        )
    return table


def render_list(statuses: Sequence[CampaignStatus]) -> RenderableType:
    """One line a campaign."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("campaign", "stages", "folder"):
        table.add_column(name, no_wrap=True)
    for status in statuses:
        states = Text(", ").join(
            Text(f"{stage.name} {stage.state}", style=COLOURS.get(stage.state, "")) for stage in status.stages
        )
        table.add_row(status.name, states, str(status.folder))
    return table


def dollars(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:,.2f}"
