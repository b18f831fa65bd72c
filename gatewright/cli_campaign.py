"""The verbs of campaigns: `submit`, `status`, `list`, `logs`, `cancel`, and `cluster show`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatewright.spec.errors import RunFailed, UserError

if TYPE_CHECKING:
    from gatewright.campaign.slurm_read import Job
    from gatewright.campaign.status import CampaignStatus
    from gatewright.campaign.submit import Prepared

PLAN_LINES = 6
cluster = typer.Typer(help="Machines that campaigns know.", no_args_is_help=True)

RunsDir = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of all runs.")]
Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="A campaign's name or folder.")]


def submit(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.yaml", show_default=False, help="A run file, or a campaign file with stages."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of a run file. May be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and stop.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run it on this machine, as child processes.")] = False,
    at_once: Annotated[int, typer.Option(min=1, metavar="N", help="Stages side by side with --local.")] = 1,
) -> None:
    """Start a chain of jobs on SLURM that goes on by itself; or go on with one that stopped.

    Returns at once. With --local it stays until the campaign is done.
    """
    from gatewright.campaign.local import run_local
    from gatewright.campaign.queue import NoQueue
    from gatewright.campaign.read import read_asked
    from gatewright.campaign.slurm import Slurm
    from gatewright.campaign.submit import prepare
    from gatewright.campaign.submit import submit as submit_prepared

    asked = read_asked(file, overrides or [])
    prepared = prepare(asked, queue="local" if local else "slurm")
    if dry_run:
        _print_dry(prepared)
        return
    queue = NoQueue() if local else Slurm()
    _print_intent(prepared)
    done = submit_prepared(prepared, queue, say=typer.echo)
    if local:
        raise typer.Exit(run_local(prepared.built.campaign, prepared.built.jobs, at_once=at_once, say=typer.echo))
    name = asked.name
    if not done.queued:
        typer.echo("nothing was left to queue")
    typer.echo(
        "It goes on by itself, from whatever node: `gatewright status "
        f"{name}` shows how far it is, `gatewright logs {name} -f` what it says, `gatewright cancel {name}` stops it."
    )


def _print_dry(prepared: "Prepared") -> None:
    """Scripts, resolved runs and the first lines of the plans, in that order a person checks them."""
    _print_intent(prepared)
    for name, script in prepared.built.scripts.items():
        typer.echo(f"\n--- {name}: job.sbatch\n{script}", nl=False)
        if name in prepared.built.run_files:
            typer.echo(f"--- {name}: run.yaml\n{prepared.built.run_files[name]}", nl=False)
    typer.echo("\nnothing was submitted (--dry-run)")


def _print_intent(prepared: "Prepared") -> None:
    """What will happen: stages and their resources, the plan, and what `check` has to say."""
    from gatewright.campaign.sbatch import wanted_text
    from gatewright.report.plan_text import render_plan

    built = prepared.built
    for stage in built.campaign.stages:
        links = f", {stage.links} links at most" if stage.links > 1 else ""
        after = f", after {', '.join(stage.needs)}" if stage.needs else ""
        state = " (done already)" if stage.name in prepared.done else ""
        typer.echo(f"{stage.job_name}: {built.works[stage.name]}{state}")
        typer.echo(f"  {wanted_text(stage.resources)}{links}{after}")
        if plan := prepared.plans.get(stage.name):
            lines = [line for line in render_plan(plan).splitlines() if line][:PLAN_LINES]
            typer.echo("\n".join(f"  {line}" for line in lines))
        elif why := prepared.unplanned.get(stage.name):
            typer.echo(f"  not planned: {why}")
    for one in prepared.findings:
        typer.echo(f"  warning {one.code} {one.name}: {one.text}")


def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One campaign in full; default: all.")] = None,
    runs_dir: RunsDir = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show it anew every few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how campaigns stand: progress, time left, links used, last checkpoint, health, cost."""
    from gatewright.campaign.status_text import render_campaign, render_table

    if as_json:
        _print_json(_statuses(name, runs_dir)[0])
        return
    while True:
        statuses, note = _statuses(name, runs_dir)
        if watch:
            typer.echo("\033[2J\033[H", nl=False)
        typer.echo(render_campaign(statuses[0]) if name else render_table(statuses))
        if note:
            typer.echo(note, err=True)
        if not watch:
            return
        time.sleep(3.0)


def _statuses(name: str | None, runs_dir: Path) -> tuple[list["CampaignStatus"], str]:
    """The campaigns asked for, and why the queue could not be asked."""
    from gatewright.campaign.status import find_campaign, find_campaigns, status_of

    folders = [find_campaign(name, runs_dir)] if name else find_campaigns(runs_dir)
    if not folders:
        raise UserError(f"no campaign in {runs_dir}/; `gatewright submit RUN.yaml` starts one")
    jobs, note = _queue_jobs()
    return [status_of(folder, jobs) for folder in folders], note


def _queue_jobs() -> tuple[list["Job"] | None, str]:
    from gatewright.campaign.slurm import QueueRefused, QueueSilent, Slurm

    try:
        return Slurm().mine(), ""
    except QueueRefused:
        return [], ""
    except QueueSilent as error:
        return None, f"by the records alone: {error}"


def _print_json(statuses: list["CampaignStatus"]) -> None:
    import json
    from dataclasses import asdict

    typer.echo(json.dumps([asdict(one) for one in statuses], indent=1, default=str))


def list_campaigns(runs_dir: RunsDir = Path("runs")) -> None:
    """List campaigns and the states of their stages."""
    from gatewright.campaign.status_text import render_list

    typer.echo(render_list(_statuses(None, runs_dir)[0]))


def cancel(
    name: Name,
    stage: Annotated[str | None, typer.Argument(metavar="STAGE", help="Only this stage.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Stop a campaign for good: what works saves and leaves, and nothing of it comes back."""
    from gatewright.campaign.cancel import cancel as cancel_campaign
    from gatewright.campaign.queue import NoQueue, Queue
    from gatewright.campaign.slurm import Slurm
    from gatewright.campaign.status import find_campaign

    folder = find_campaign(name, runs_dir)
    campaign = folder.campaign()
    queue: Queue = NoQueue() if campaign is not None and campaign.queue == "local" else Slurm()
    done = cancel_campaign(folder, queue, stage=stage)
    typer.echo(f"halted: {', '.join(done.stages) or 'nothing that was not done or halted already'}")
    if done.jobs:
        typer.echo(f"cancelled jobs {', '.join(done.jobs)}; `gatewright submit` again goes on from the last checkpoint")


def logs(
    name: Name,
    stage: Annotated[str | None, typer.Argument(metavar="STAGE", help="Default: the one that began last.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with every new line, from link to link.")
    ] = False,
    lines: Annotated[int, typer.Option("-n", min=1, metavar="N", help="Lines to begin with.")] = 40,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print what a campaign's jobs say."""
    from gatewright.campaign.logs import follow as follow_log
    from gatewright.campaign.logs import log_files, tail
    from gatewright.campaign.status import find_campaign

    jobs = find_campaign(name, runs_dir)
    campaign = jobs.campaign()
    names = [one.name for one in campaign.stages] if campaign else []
    if stage is not None and stage not in names:
        raise UserError(f"{name} has no stage {stage!r}; it has {', '.join(names)}")
    begun = {one: files[-1].stat().st_mtime for one in names if (files := log_files(jobs.stage(one)))}
    chosen = stage or max(begun, key=begun.__getitem__, default=names[0] if names else "")
    folder = jobs.stage(chosen)
    if not log_files(folder) and not follow:
        raise RunFailed(
            f"{name}: no job of stage {chosen} has begun yet; `gatewright status {name}` says what it waits for"
        )
    for line in follow_log(folder, lines=lines) if follow else tail(folder, lines=lines):
        typer.echo(line)


@cluster.callback()
def _machines() -> None:
    pass


@cluster.command("show")
def show(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A machine; default: list them.")] = None,
) -> None:
    """Print what a machine's preset sets for a job, and why."""
    from gatewright.campaign.preset_text import render_preset
    from gatewright.campaign.presets import find_preset, presets

    if name is not None:
        typer.echo(render_preset(find_preset(name)))
        return
    for preset in presets():
        typer.echo(f"{preset.name:<10} {preset.title}")
