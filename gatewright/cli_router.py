"""The verbs `router measure`, `router capacity` and `router placement`: where tokens go, and what follows from it."""

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gatewright.router.blocks import RoutingRecord
    from gatewright.spec.event import Event

router = typer.Typer(help="Measure where a router sends tokens; capacity factor and placement.", no_args_is_help=True)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml|FILE.npz", show_default=False, help="A run that was measured, its folder, or a record."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Per(StrEnum):
    expert = "expert"
    rank = "rank"


@router.command()
def measure(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", show_default=False, help="The run.")],
    documents: Annotated[int, typer.Option(metavar="N", help="Training documents to read.", min=1)] = 100,
    trained: Annotated[bool, typer.Option("--trained", help="The run's result instead of its base model.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. May be repeated.")
    ] = None,
) -> None:
    """Record where the router sends the run's own training documents, block by block, in its folder."""
    from gatewright.cli_quiet import quiet_libraries
    from gatewright.router.text import measure_text
    from gatewright.spec.read import read_run

    run = read_run(run_file, overrides or [])
    quiet_libraries()

    from gatewright.train.measure_routing import measure_run

    path, record = measure_run(run, documents=documents, trained=trained, log=_say_finding)
    typer.echo(measure_text(record, path=str(path)))


@router.command()
def capacity(
    source: Source,
    tokens: Annotated[int, typer.Option(metavar="N", show_default=False, help="Tokens of a document, or of a pack.")],
    packed: Annotated[bool, typer.Option("--packed", help="Micro-batches are packs of whole documents.")] = False,
    documents: Annotated[
        int, typer.Option("--documents-per-micro-batch", metavar="N", help="Documents in a rank's micro-batch.")
    ] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="Expert-parallel size.")] = 1,
    per: Annotated[Per, typer.Option(help="What has a capacity: each expert, or each rank's experts together.")] = (
        Per.expert
    ),
    drop: Annotated[float, typer.Option(metavar="SHARE", help="Largest mean share that may be dropped.")] = 0.01,
    factor: Annotated[float | None, typer.Option(metavar="CF", help="Also say what this factor drops.")] = None,
    as_json: Json = False,
) -> None:
    """The smallest capacity factor that keeps drops under a bound, with its upper confidence bound and its floor."""
    from gatewright.router.capacity import Question, estimate_capacity, estimate_drop
    from gatewright.router.text import capacity_text

    question = Question(tokens=tokens, packed=packed, documents=documents, ep=ep, per=per.value, drop=drop)
    record = _record(source)
    estimate = estimate_capacity(record, question)
    asked = (factor, *estimate_drop(record, question, factor)) if factor is not None else None
    if not as_json:
        typer.echo(capacity_text(estimate, question, experts=record.experts, asked=asked))
        return
    answer = {"question": asdict(question), **asdict(estimate)}
    if asked:
        answer["asked"] = dict(zip(("factor", "drop", "endless_drop"), asked, strict=True))
    typer.echo(json.dumps(answer, indent=2))


@router.command()
def placement(
    source: Source,
    ep: Annotated[int, typer.Option(metavar="N", show_default=False, help="Expert-parallel size.")],
    as_json: Json = False,
) -> None:
    """Spread the experts over ranks by their loads: the busiest rank before and after."""
    import numpy as np

    from gatewright.router.placement import contiguous, place, worst_rank_loads
    from gatewright.router.text import placement_text
    from gatewright.spec.errors import DataError

    record = _record(source)
    loads = record.loads().tolist()
    straight = contiguous(layers=len(loads), experts=record.experts, ep=ep)
    placed = place(loads, ep=ep)
    numbers = np.unique(record.document)
    if len(numbers) < 2:
        raise DataError(f"{source}: 1 document is too few to place experts by; measure more with --documents N")
    half, rest = record.only(numbers[::2]).loads().tolist(), record.only(numbers[1::2]).loads().tolist()
    before, after = worst_rank_loads(straight, loads), worst_rank_loads(placed, loads)
    elsewhere = worst_rank_loads(place(half, ep=ep), rest)
    if not as_json:
        typer.echo(placement_text(record.layers, before, after, elsewhere, ep=ep, documents=record.documents))
        return
    rows = [
        {"layer": layer, "contiguous": now, "placed": then, "elsewhere": other, "order": order}
        for layer, now, then, other, order in zip(record.layers, before, after, elsewhere, placed.order, strict=True)
    ]
    typer.echo(json.dumps({"ep": ep, "documents": record.documents, "layers": rows}, indent=2))


def _record(source: Path) -> "RoutingRecord":
    """The record itself, or that in the folder of a run."""
    from gatewright.router.blocks import FILE, read_record
    from gatewright.spec.read import read_run

    if source.is_dir():
        return read_record(source / FILE)
    return read_record(source if source.suffix == ".npz" else read_run(source).folder / FILE)


def _say_finding(event: "Event") -> None:
    """What the user should know of the run, beside the answer."""
    from gatewright.spec.event import Finding

    if isinstance(event, Finding):
        typer.echo(f"{event.severity}: {event.text}", err=True)
