"""The command line: one verb a job of the user's; a verb imports its part of the house only when it is called."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from gatewright import (
    __version__,
    cli_campaign,
    cli_check,
    cli_checkpoint,
    cli_data,
    cli_export,
    cli_plan,
    cli_probe,
    cli_router,
    cli_train,
)
from gatewright.cli_write import write_whole
from gatewright.spec.errors import GatewrightError

EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "jinja2": "train",
    "pyarrow": "train",
    "bitsandbytes": "quantize",
    "gguf": "export",
    "llama_cpp": "export",
    "openai": "synth",
    "tenacity": "synth",
    "PIL": "plot",
}
"""Packages that a bare install leaves out, and the extra that brings them."""

app = typer.Typer(
    help="Plan, train and ship fine-tuned mixture-of-experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_data.data, name="data")
app.add_typer(cli_campaign.cluster, name="cluster")
app.add_typer(cli_router.router, name="router")
app.add_typer(cli_checkpoint.checkpoint, name="checkpoint")


def main() -> None:
    """Runs the command line and ends the process: 0 done, 1 the run failed, 2 your input, 130 interrupted.

    A run also ends with 85, saved because its time was up, or 3, it cannot finish in the time it has.
    """
    # pydantic would look for plugins in the metadata of every installed package: slow on the disk of a cluster
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except GatewrightError as error:
        if os.environ.get("GATEWRIGHT_DEBUG") == "1":
            traceback.print_exc()
        if str(error):
            _say_error(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRAS:
            _say_error(f'this needs {package}, which is not installed: pip install "gatewright[{EXTRAS[package]}]"')
            sys.exit(2)
        traceback.print_exc()
        _say_error(
            "this is a bug in Gatewright, not a mistake of yours. Please report it with the lines above, "
            f"the command and the run file (gatewright {__version__}, Python {sys.version.split()[0]})"
        )
        sys.exit(1)


def _say_error(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


def _table_width() -> int | None:
    """Of a table that is piped: rich would take 80 columns and cut numbers off."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gatewright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(cli_train.train)


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False, help="A run's name, folder or run file.")],
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The page; default: report.html in the run folder.")
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Print only.")] = False,
) -> None:
    """Show how a run went: in the terminal, and as one self-contained HTML page."""
    if html is not None and no_html:
        raise typer.BadParameter("give --html or --no-html, not both")
    from rich.console import Console

    from gatewright.report.html import render_html
    from gatewright.report.read import read_run_folder
    from gatewright.report.text import render_text

    folder = _run_folder(run)
    facts = read_run_folder(folder)
    console = Console()
    console.print(render_text(facts))
    if not no_html:
        page = html or folder / "report.html"
        write_whole(page, render_html(facts).encode(), option="--html")
        console.print(f"Page: {page}", highlight=False, markup=False, soft_wrap=True)


app.command()(cli_plan.plan)
app.command()(cli_check.check)
app.command()(cli_check.doctor)
app.command()(cli_probe.probe)
app.command()(cli_export.export)
app.command()(cli_export.verify)
app.command()(cli_campaign.submit)
app.command()(cli_campaign.status)
app.command("list")(cli_campaign.list_campaigns)
app.command()(cli_campaign.logs)
app.command()(cli_campaign.cancel)


@app.command()
def models() -> None:
    """List the models of the catalogue, with their parameters and sizes."""
    from rich.console import Console

    from gatewright.planner.catalogue_tables import models_table

    Console(width=_table_width()).print(models_table())


@app.command()
def gpus() -> None:
    """List the GPUs of the catalogue, with memory, rates and prices."""
    from rich.console import Console

    from gatewright.planner.catalogue_tables import gpus_table

    Console(width=_table_width()).print(gpus_table())


def _run_folder(run: str) -> Path:
    """The run folder meant by a folder, a run file, or the name of a run in runs/ (whether it is there or not)."""
    from gatewright.spec.read import read_run

    given, named = Path(run), Path("runs") / run
    if given.is_file():
        return read_run(given).folder
    return given if given.is_dir() and not (named / "events.jsonl").is_file() else named


@app.command()
def schema() -> None:
    """Print the JSON Schema of the run file, for editors."""
    import json

    from gatewright.spec.read import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
