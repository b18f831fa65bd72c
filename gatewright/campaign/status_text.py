"""Campaigns on a terminal: a table with bars, one stage a line, and every start of a job of one campaign. Plain text
with colours: a table of hundreds of runs must not take longer to lay out than to read."""

import time
from collections.abc import Sequence

import typer

from gatewright.campaign.status import CampaignStatus, StageStatus, totals
from gatewright.report.units import duration
from gatewright.spec.campaign import Life

BAR = 12
COLOURS = {
    "done": typer.colors.GREEN,
    "running": typer.colors.CYAN,
    "queued": typer.colors.BLUE,
    "ready": typer.colors.YELLOW,
    "halted": typer.colors.RED,
}
RIGHT = {"eta", "links", "saved", "loss", "GPU-h", "cost", "for"}
"""Columns of numbers."""


def render_table(statuses: Sequence[CampaignStatus]) -> str:
    """Every stage of every campaign, and what all of them cost."""
    names = ("campaign", "stage", "state", "progress", "eta", "links", "saved", "loss", "GPU-h", "cost", "notes")
    rows = [
        (status.name if number == 0 else "", *_cells(stage))
        for status in statuses
        for number, stage in enumerate(status.stages)
    ]
    gpu_hours, usd = totals(statuses)
    cost = f", {dollars(usd)}" if usd is not None else ""
    return "\n".join([*table(names, rows), f"{gpu_hours:,.1f} GPU-hours so far{cost}"])


def _cells(stage: StageStatus) -> tuple[str, ...]:
    notes = "; ".join(filter(None, (stage.health, stage.detail.splitlines()[0] if stage.detail else "")))
    return (
        stage.name,
        stage.state,
        bar(stage.step, stage.steps),
        "" if stage.remaining_s is None else duration(stage.remaining_s),
        f"{stage.links_used}/{stage.links}",
        "" if stage.checkpoint is None else f"{stage.checkpoint:,}",
        "" if stage.loss is None else f"{stage.loss:.4f}",
        f"{stage.gpu_hours:,.1f}",
        "" if stage.usd is None else dollars(stage.usd),
        notes,
    )


def bar(step: int, steps: int) -> str:
    """`━━━━━━────── 1,200/2,400`; empty before the run has said how long it is."""
    if not steps:
        return ""
    full = min(BAR, step * BAR // steps)
    return f"{'━' * full}{'─' * (BAR - full)} {step:,}/{steps:,}"


def render_campaign(status: CampaignStatus) -> str:
    """The table, every start of every job, and the reasons why stages halted."""
    parts = [render_table([status])]
    for stage in status.stages:
        if stage.lives:
            parts += ["", typer.style(f"{stage.name}: every start of a job", bold=True), *_lives(stage.lives)]
        if stage.state == "halted":
            parts += ["", typer.style(f"{stage.name} halted: {stage.detail}", fg=typer.colors.RED)]
    return "\n".join(parts)


def _lives(lives: Sequence[Life]) -> list[str]:
    rows = [
        (
            life.job + (f" (start {life.restart + 1})" if life.restart else ""),
            time.strftime("%d %b %H:%M:%S", time.localtime(life.started)),
            "" if life.ended is None else duration(life.ended - life.started),
            "" if life.first_step is None else f"{life.first_step:,}–{life.last_step:,}",
            "" if life.checkpoint_after is None else f"{life.checkpoint_after:,}",
            life.outcome or "working",
            "; ".join([*life.reason.splitlines()[:1], *life.notes]),
        )
        for life in lives
    ]
    return table(("job", "began", "for", "steps", "saved", "outcome", "reason"), rows)


def render_list(statuses: Sequence[CampaignStatus]) -> str:
    """One line a campaign."""
    rows = [
        (status.name, ", ".join(f"{one.name} {one.state}" for one in status.stages), str(status.folder))
        for status in statuses
    ]
    return "\n".join(table(("campaign", "stages", "folder"), rows))


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; columns that are empty in every row are left out, and a state has its colour."""
    kept = [number for number, name in enumerate(names) if any(row[number] for row in rows)]
    widths = {number: max(len(names[number]), *(len(row[number]) for row in rows)) for number in kept}

    def line(cells: Sequence[str], *, bold: bool = False) -> str:
        texts = []
        for number in kept:
            text = cells[number]
            padded = text.rjust(widths[number]) if names[number] in RIGHT else text.ljust(widths[number])
            texts.append(typer.style(padded, fg=COLOURS.get(text), bold=bold) if bold or text in COLOURS else padded)
        return "  ".join(texts).rstrip()

    return [line(names, bold=True), *(line(row) for row in rows)]


def dollars(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:,.2f}"
