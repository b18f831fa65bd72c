"""The verbs `data inspect` and `data schedule`: what documents look like, and what their steps take on many ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gatewright.cli_write import write_whole
from gatewright.spec.errors import DataError, UserError

if TYPE_CHECKING:
    from gatewright.packing.arrays import IntArray
    from gatewright.spec.schedule import ScheduleReport

data = typer.Typer(help="Look at training data.", no_args_is_help=True)

DOCUMENTS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
"""Endings of files that hold documents; any other file holds lengths."""
DEFAULT_MODEL = "Qwen3-30B-A3B"
DEFAULT_CAPACITY_TOKENS = 8192
DEFAULT_MICRO_BATCHES = 4
MAX_WORLD = 4096


@data.command()
def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", show_default=False, help="JSONL, Parquet, dataset folder; or text, one length a line."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", show_default=False, help="Model whose tokenizer counts; lengths need none."),
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="N|pNN", help="Longest document: tokens, or a percentile such as p99.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens a micro-batch holds.")] = None,
) -> None:
    """Show how long the documents are, what padding would waste, and what packing gains."""
    from rich.console import Console

    limit = int(max_tokens) if max_tokens is not None and max_tokens.isdecimal() else max_tokens
    knee = _knee_tokens(model) if model else None
    if _holds_lengths(file):
        from gatewright.packing.lengths_file import read_lengths
        from gatewright.packing.lengths_page import lengths_page

        lengths, empty = read_lengths(file)
        typer.echo(
            lengths_page(lengths, source=str(file), empty=empty, max_tokens=limit, capacity=capacity, knee_tokens=knee),
            nl=False,
        )
        return
    if model is None:
        raise typer.BadParameter("documents are counted by a model's tokenizer: give --model FOLDER")
    from gatewright.data.inspect import inspect_data

    inspect_data(file, model=model, max_tokens=limit, capacity=capacity, knee_tokens=knee, console=Console())


@data.command()
def schedule(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="One length a line; or documents, or a token store."),
    ],
    world: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_WORLD, help="Ranks.", show_default=False)],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="As in `gatewright gpus`, or cpu.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Of `gatewright models`, or a folder. Default: {DEFAULT_MODEL}."),
    ] = None,
    tokens_per_rank: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="That a micro-batch holds on a rank. Default: 8192.")
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of all ranks. Default: four micro-batches.")
    ] = None,
    per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ranks in a node.")] = None,
    probe: Annotated[
        Path | None, typer.Option(metavar="probe.json", help="Costs by `gatewright probe --attention`, not assumed.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Simulated, evenly spread over the file.")] = 8,
    png: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw the first step: ranks by time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a step on many ranks: context parallelism chosen per document, beside one CP size for all."""
    report = _schedule_report(
        file,
        world=world,
        gpu=gpu,
        model=model,
        capacity=tokens_per_rank,
        tokens_per_step=tokens_per_step,
        per_node=per_node,
        probe=probe,
        steps=steps,
    )
    from gatewright.report.schedule_text import as_json as to_json
    from gatewright.report.schedule_text import render_schedule

    if png is not None:
        from gatewright.cli_png import draw
        from gatewright.report.schedule_picture import picture

        write_whole(png, draw(picture(report)), option="--png")
    typer.echo(json.dumps(to_json(report), indent=2) if as_json else render_schedule(report), nl=as_json)
    if png is not None and not as_json:
        typer.echo(f"\nwritten   {png}")


def _schedule_report(
    file: Path,
    *,
    world: int,
    gpu: str,
    model: str | None,
    capacity: int | None,
    tokens_per_step: int | None,
    per_node: int | None,
    probe: Path | None,
    steps: int,
) -> ScheduleReport:
    from gatewright.packing.cost import cost_model, cpu_rates, find_rates, read_rates
    from gatewright.packing.simulate import simulate
    from gatewright.planner.catalogue import find_gpu, find_shape
    from gatewright.spec.schedule import ScheduleReport

    rates = cpu_rates() if gpu == "cpu" else find_rates(find_gpu(gpu))
    rates = read_rates(probe) if probe else rates
    costs = cost_model(find_shape(model or DEFAULT_MODEL), rates, ranks_per_node=per_node)
    lengths, empty = _lengths(file, model)
    longest = int(lengths.max())
    room = capacity or max(DEFAULT_CAPACITY_TOKENS, -(-longest // world))
    if longest > world * room:
        size = longest * costs.exchange_bytes // 3
        raise DataError(
            f"{_place(file, lengths)}: {longest:,} tokens, with {size / 2**30:,.1f} GiB of keys and values, more than "
            f"all {world} ranks can hold together ({world} × {room:,} = {world * room:,} tokens); shorten it, or give "
            f"--tokens-per-rank {-(-longest // world)} or --world {-(-longest // room)}"
        )
    per_step = tokens_per_step or DEFAULT_MICRO_BATCHES * world * room
    in_file, reports = simulate(lengths, ranks=world, capacity=room, costs=costs, tokens_per_step=per_step, steps=steps)
    return ScheduleReport(
        source=str(file),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        empty_documents=empty,
        longest_tokens=longest,
        model=model or DEFAULT_MODEL,
        model_is_default=model is None,
        gpu=gpu,
        rates_source=rates.source,
        ranks=world,
        ranks_per_node=costs.ranks_per_node,
        capacity_tokens=room,
        capacity_is_default=capacity is None,
        steps_in_file=in_file,
        steps=tuple(reports),
    )


def _holds_lengths(file: Path) -> bool:
    return file.is_file() and not file.name.endswith(DOCUMENTS)


def _lengths(file: Path, model: str | None) -> tuple[IntArray, int]:
    """[documents] and how many were empty: of a file of lengths, a token store, or documents that are tokenised now."""
    if (file / "store.json").is_file():
        import numpy as np

        ends = np.fromfile(file / "offsets.bin", np.int64)
        lengths = ends[1:] - ends[:-1]
        if not lengths.any():
            raise DataError(f"{file}: no tokens in this store")
        return lengths[lengths > 0], int((lengths == 0).sum())
    if file.exists() and not _holds_lengths(file):
        if model is None or not Path(model).is_dir():
            raise UserError(f"{file} holds documents, which a tokenizer has to count: give --model FOLDER.")
        from gatewright.data.inspect import document_lengths

        return document_lengths(file, model=model), 0
    from gatewright.packing.lengths_file import read_lengths

    return read_lengths(file)


def _place(file: Path, lengths: IntArray) -> str:
    """Where the longest document stands."""
    number = int(lengths.argmax())
    if not _holds_lengths(file):
        return f"{file}, document {number + 1:,}"
    from gatewright.packing.lengths_file import line_of

    return f"{file}:{line_of(file, number)}"


def _knee_tokens(model: str) -> int | None:
    """Where the model's attention costs as much as all the rest; None where its config has no exact formulas."""
    from gatewright.planner.catalogue import find_shape
    from gatewright.planner.time import knee_tokens
    from gatewright.spec.errors import ModelError

    try:
        return knee_tokens(find_shape(model))
    except ModelError:  # the page says so
        return None
