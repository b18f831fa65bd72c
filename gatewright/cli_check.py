"""The verbs `check` and `doctor`: what will break before a run, and what broke after it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatewright.spec.errors import UserError

if TYPE_CHECKING:
    from gatewright.spec.plan import Plan
    from gatewright.spec.run import Run

Codes = Annotated[list[str] | None, typer.Option(metavar="CODE", help="Codes, beginnings such as GW2, or names.")]


def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE…", show_default=False, help="Run files, other tools' configs, scripts, folders."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="The GPU, as in `gatewright gpus`.")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="How many.", min=1)] = None,
    step_seconds: Annotated[float | None, typer.Option(metavar="S", help="A measured step.", min=0.0)] = None,
    p99_tokens: Annotated[int | None, typer.Option(metavar="N", help="99th percentile of the data.", min=1)] = None,
    package: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VERSION", help="A package as installed there. May be repeated.")
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(metavar="probe.json", help="What `gatewright probe` measured, judged for the run.")
    ] = None,
    select: Codes = None,
    ignore: Codes = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply the safe fixes; the old files are kept as .orig.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF.")] = False,
    github: Annotated[bool, typer.Option("--github", help="Print GitHub annotations.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Print the page of a rule and stop.")] = None,
    parity: Annotated[
        bool, typer.Option("--parity", help="Prove on this machine's ranks that divided experts compute what whole do.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="With --parity: ranks to start on this machine.")
    ] = None,
) -> None:
    """Judge configs before a GPU is booked: ours, axolotl, LLaMA-Factory, TRL, ms-swift, DeepSpeed, Megatron, sbatch …

    Exit code 1 when a rule of severity error is broken.
    """
    from gatewright.preflight.catalogue import find_rule
    from gatewright.preflight.check import check as judge
    from gatewright.preflight.fix import apply_safe, diffs, safe_repairs
    from gatewright.preflight.gather import Given
    from gatewright.preflight.output import as_github, as_sarif, render_text
    from gatewright.preflight.output import as_json as to_json
    from gatewright.preflight.pages import page

    if parity:
        from gatewright.cli_parity import prove_parity

        raise typer.Exit(prove_parity(files or [], nproc=nproc))
    if explain:
        rule = find_rule(explain)
        if rule is None:
            raise UserError(f"no rule is called {explain!r}; `gatewright check FILE` prints the codes that apply")
        typer.echo(page(rule))
        return
    if not files:
        raise typer.BadParameter("give at least one file or folder to check")
    versions = tuple(_pair(text) for text in package or [])
    given = Given(gpu=gpu, gpus=gpus, step_s=step_seconds, p99_tokens=p99_tokens, versions=versions, probe=probe)
    verdict = judge(files, given=given, select=select or (), ignore=ignore or ())
    if as_json or sarif or github:
        typer.echo(to_json(verdict) if as_json else as_sarif(verdict) if sarif else as_github(verdict))
    else:
        typer.echo(render_text(verdict))
    if fix:
        for text in diffs(verdict, safe_repairs(verdict)).values():
            typer.echo(text)
        for name, kept in apply_safe(verdict):
            typer.echo(f"fixed {name}; the old file is {kept}")
    raise typer.Exit(verdict.exit_code)


def _pair(text: str) -> tuple[str, str]:
    name, equals, version = text.partition("=")
    if not (name and equals and version):
        raise typer.BadParameter(f"--package wants NAME=VERSION, got {text!r}")
    return name, version


def _planned(run: Run | None) -> Plan | None:
    """The plan of a run file that names its hardware; the doctor does without where it cannot be planned."""
    if run is None or run.hardware is None:
        return None
    from gatewright.planner.plan_run import plan_run
    from gatewright.spec.errors import GatewrightError

    try:
        return plan_run(run)
    except GatewrightError:
        return None


def doctor(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="LOG…", show_default=False, help="Logs, folders, a SLURM job's number; -: standard input."
        ),
    ] = None,
    run_file: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.yaml", help="The run, so that fixes show its values.")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="plan.json", help="The plan; default: plan.json beside the logs.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch a log that is being written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Print the page of a cause and stop.")] = None,
) -> None:
    """Explain a failed run from its logs: the root cause first, what followed from it after, and what to change."""
    from rich.console import Console

    from gatewright.doctor.beside_plan import find_plan
    from gatewright.doctor.diagnosis import diagnose, to_json
    from gatewright.doctor.follow import follow as watch
    from gatewright.doctor.table import explain as page_of
    from gatewright.doctor.text import render_text
    from gatewright.spec.read import read_run
    from gatewright.spec.read_plan import read_plan

    if explain:
        typer.echo(page_of(explain))
        return
    if not logs:
        raise typer.BadParameter("give at least one log, folder, or - for standard input")
    run = read_run(run_file) if run_file else None
    from_input = Path("-") in logs
    paths = [log for log in logs if log != Path("-")]
    note = ""
    try:
        plan = read_plan(plan_file) if plan_file else find_plan(paths) or _planned(run)
    except UserError as error:
        if plan_file:
            raise
        plan, note = None, str(error)
    if follow:
        if len(paths) != 1:
            raise typer.BadParameter("--follow watches one log")
        for diagnosis in watch(
            paths[0], run=run, planned=plan.memory if plan else None, knobs=plan.knobs if plan else ()
        ):
            Console().print(render_text(diagnosis))
        return
    diagnosis = diagnose(
        paths,
        stdin=sys.stdin.buffer if from_input else None,
        run=run,
        planned=plan.memory if plan else None,
        knobs=plan.knobs if plan else (),
    )
    if note:
        diagnosis = replace(diagnosis, notes=(*diagnosis.notes, note))
    if as_json:
        typer.echo(json.dumps(to_json(diagnosis), indent=2))
    else:
        Console().print(render_text(diagnosis))
