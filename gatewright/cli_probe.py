"""The verb `probe`: what this machine really does, measured in child processes and written as probe.json."""

from pathlib import Path
from typing import Annotated

import typer

from gatewright.cli_write import write_whole


def probe(
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="Write probe.json, for `check --probe`.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or config.json of the model, for the sizes of its heads.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these: machine, devices, attention, groups, disk …")
    ] = None,
    attention: Annotated[
        bool, typer.Option("--attention", help="Only attention: its kernels, and the costs that schedules go by.")
    ] = False,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where checkpoints will be written; default: here.")
    ] = Path(),
    write_mib: Annotated[int, typer.Option(metavar="MIB", min=1, max=2**16, help="Written to time the disk.")] = 256,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0.1, max=3600, help="Of every measurement, instead of its own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what this machine really does: memory, kernels, communication, disks. Run it on a compute node.

    Each measurement is a process with a time-out; one that hangs is ended and named. Exit code 1: one failed or hung.
    """
    from gatewright.probe.children import Wanted
    from gatewright.probe.children import probe as measure
    from gatewright.report.probe_text import outcome_lines, render_probe
    from gatewright.spec.errors import UserError
    from gatewright.spec.probe import Outcome

    if model is not None and not Path(model).exists():
        raise UserError(f"--model {model}: no such folder or config.json; the sizes of the heads are read from it")

    def tell(outcome: Outcome) -> None:
        for line in outcome_lines(outcome):
            typer.echo(line)

    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    names += ["attention", "costs"] if attention else []
    wanted = Wanted(model=model, folder=str(folder), write_bytes=write_mib * 2**20)
    found = measure(wanted, only=names, timeout_s=timeout, tell=(lambda _: None) if as_json else tell)
    if out is not None:
        write_whole(out, found.as_json().encode(), option="--out")
    if as_json:
        typer.echo(found.as_json(), nl=False)
    else:
        typer.echo("\n" + render_probe(found).splitlines()[-1])
        if out is not None:
            typer.echo(f"written   {out}")
    raise typer.Exit(int(any(outcome.status in ("failed", "hung") for outcome in found.outcomes)))
