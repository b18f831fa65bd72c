"""The verbs `checkpoint list`, `verify` and `consolidate`: what a run has saved, whether sound, and in one file."""

from pathlib import Path
from typing import Annotated

import typer

from gatewright.spec.errors import UserError

checkpoint = typer.Typer(help="Look after checkpoints.", no_args_is_help=True)

Where = Annotated[
    Path, typer.Argument(metavar="RUN|FOLDER", show_default=False, help="A run file, or any folder of it.")
]


@checkpoint.command("list")
def list_(where: Where) -> None:
    """List the complete checkpoints of a run, oldest first."""
    from gatewright.train.checkpoint import complete
    from gatewright.train.pieces import SavedState

    for found in complete(_root(where)):
        ranks = SavedState(found.path).ranks
        typer.echo(
            f"{found.path}  step {found.step:,}  {found.bytes:,} bytes  written by {ranks} rank{'s' * (ranks > 1)}"
        )


@checkpoint.command()
def verify(where: Where) -> None:
    """Read every file of a run's checkpoints, or of one, and compare sizes and hashes.

    Exit code 1 where one is damaged.
    """
    from gatewright.train.checkpoint import MANIFEST, complete
    from gatewright.train.checkpoint import verify as verify_one

    paths = [where] if (where / MANIFEST).is_file() else [found.path for found in complete(_root(where))]
    damaged = 0
    for path in paths:
        fault = verify_one(path)
        damaged += fault is not None
        typer.echo(f"{path}  {'sound' if fault is None else f'damaged: {fault}'}")
    raise typer.Exit(1 if damaged else 0)


@checkpoint.command()
def consolidate(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", show_default=False, help="A folder step-NNNNNNNN.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="Where to write it anew.")],
) -> None:
    """Write a checkpoint of many ranks as one process would have: every tensor whole, in one file."""
    from gatewright.train.consolidate import consolidate as write

    written = write(source, out)
    typer.echo(f"{written.path}  step {written.step:,}  {written.bytes:,} bytes")


def _root(where: Path) -> Path:
    """The folder of checkpoints meant by a run file, a run's folder, or that folder itself."""
    from gatewright.spec.read import read_run

    folder = read_run(where).folder if where.is_file() else where
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not any(root.glob("step-*")):
        raise UserError(f"{root}: no checkpoint there; give a run file, a run's folder, or its checkpoints folder")
    return root
