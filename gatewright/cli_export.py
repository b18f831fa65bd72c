"""The verbs `export` and `verify`: a trained model into files that other programs run, and whether they are it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gatewright.cli_quiet import quiet_libraries
from gatewright.spec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from rich.table import Table

    from gatewright.export.sample import SampleRequest
    from gatewright.export.source import ExportSource

GIB = 1024**3
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads; default: all we may use.")]
Library = Annotated[
    Path | None, typer.Option("--llama", metavar="DIR", help="Folder of another build of llama.cpp's libraries.")
]


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|ADAPTER|MODEL", show_default=False, help="A run, or a folder of one of these.")
    ],
    to: Annotated[Literal["merged", "gguf", "adapter-gguf"], typer.Option(help="What to write.")] = "gguf",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Result folder; default: exports/NAME.")] = None,
    quant: Annotated[
        str, typer.Option(metavar="LIST", help="Levels: f32, bf16, f16, q8_0, …; q4_k_m:PATTERN=q6_k mixes.")
    ] = "f16,q8_0,q4_k_m",
    base: Annotated[Path | None, typer.Option(metavar="MODEL", help="The adapter's base model, if it moved.")] = None,
    dtype: Annotated[Literal["f32", "f16", "bf16"], typer.Option(help="Of the merged safetensors.")] = "f32",
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Training data; default: the run's.")] = None,
    heldout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Data to compare on; default: the run's.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens read for importance.")] = 8192,
    check_tokens: Annotated[int, typer.Option(metavar="N", min=16, help="Tokens compared.")] = 2048,
    device_memory: Annotated[
        str | None, typer.Option(metavar="24GiB", help="Memory of the machine that will run it: says what fits.")
    ] = None,
    context_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Context that it will run with.")] = 4096,
    converter: Annotated[
        Path | None, typer.Option(metavar="SCRIPT", help="llama.cpp's convert_hf_to_gguf.py, for other architectures.")
    ] = None,
    converter_hash: Annotated[str | None, typer.Option(metavar="SHA256", help="Run this unknown converter.")] = None,
    library: Library = None,
    threads: Threads = None,
) -> None:
    """Merge, convert to GGUF, quantise, and compare each file with the original. Started again, it goes on.

    Exit code 1 when a file is not the model it should be; it is then called .failed.gguf.
    """
    quiet_libraries()
    _use_library(library)
    device_bytes = _bytes(device_memory) if device_memory else None
    from rich.console import Console

    from gatewright.export.quantise import parse_recipes

    recipes = parse_recipes(quant)

    import torch

    from gatewright.export.pipeline import ExportRequest
    from gatewright.export.pipeline import export as run_export
    from gatewright.export.source import find_source

    if threads:
        torch.set_num_threads(threads)
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
    found = find_source(source, base=base)
    types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    request = ExportRequest(
        source=found,
        to=to,
        recipes=recipes,
        out=out or Path("exports") / found.name,
        dtype=types[dtype],
        sample=None if to == "merged" else _sample(found, data, heldout, calibration_tokens, check_tokens),
        converter=converter,
        converter_hash=converter_hash,
        threads=threads,
        context_tokens=context_tokens,
    )
    outcome = run_export(request, console=console)
    if outcome.manifest["files"]:
        console.print(_table(outcome.manifest, found.base, device_bytes, context_tokens))
    _print_failures(console.print, outcome.manifest)
    console.print(f"Results: {request.out}", highlight=False, soft_wrap=True)
    if outcome.work_bytes:
        console.print(
            f"{request.out / 'work'} holds {outcome.work_bytes / GIB:.1f} GiB of intermediate files, so that more "
            "files can follow quickly; delete it when you are done",
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(0 if outcome.passed else 1)


def verify(
    file: Annotated[Path, typer.Argument(metavar="MODEL.gguf", show_default=False, help="The file to judge.")],
    against: Annotated[Path, typer.Option(metavar="DIR", show_default=False, help="What `gatewright export` wrote.")],
    adapter: Annotated[Path | None, typer.Option(metavar="FILE", help="A GGUF adapter to put on it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    library: Library = None,
    threads: Threads = None,
) -> None:
    """Compare a GGUF file with the original, on the machine that will run it; needs numpy and llama.cpp alone.

    Exit code 1 when it is not the model it should be.
    """
    _use_library(library)
    from rich.console import Console

    from gatewright.export.verify import judge

    console = Console()
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    with console.status("comparing") if not as_json else _nothing():
        verdict = judge(file, against, threads=threads, adapter=adapter)
    if as_json:
        typer.echo(json.dumps(verdict, indent=2))
    else:
        console.print(_figures_table(verdict["figures"]))
        for gate in verdict["gates"]:
            mark = "[green]passed[/green]" if gate["passed"] else "[bold red]FAILED[/bold red]"
            console.print(f"{mark} {gate['name']}: {gate['value']:.3g}, at most {gate['limit']:.3g}", highlight=False)
    raise typer.Exit(0 if verdict["passed"] else 1)


def _sample(
    source: ExportSource, data: Path | None, heldout: Path | None, calibration_tokens: int, check_tokens: int
) -> SampleRequest:
    from gatewright.export.sample import SampleRequest

    run = source.run
    train = data or (Path(run.data.train) if run else None)
    if train is None:
        raise UserError(
            "a GGUF file is compared with the original on data, and quantised by what the data shows; an adapter or "
            "model folder names none: give --data FILE (what it was trained on), and --heldout FILE if you have it"
        )
    if heldout is None and data is None and run and run.evaluate:
        heldout = Path(run.evaluate.data)
    return SampleRequest(
        train=train,
        heldout=heldout,
        template=run.data.chat_template if run else None,
        calibration_tokens=calibration_tokens,
        check_tokens=check_tokens,
        document_tokens=512,
        prompts=16,
        answer_tokens=16,
    )


def _use_library(folder: Path | None) -> None:
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(
            f"--llama: no folder {folder}; wanted one with libllama of the release that llama-cpp-python is for"
        )
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([\d.]+)\s*(GiB|GB|MiB|MB)", text.strip(), re.IGNORECASE)
    if not found:
        raise UserError(f"--device-memory: {text!r} is no size; wanted such as 24GiB or 16GB")
    units = {"gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    return int(float(found[1]) * units[found[2].lower()])


def _table(manifest: Mapping[str, Any], base: Path, device_bytes: int | None, context_tokens: int) -> Table:
    from rich.table import Table

    table = Table(title=f"{manifest['name']} against the original in float32; in brackets, the base model's own")
    for name in ("file", "GiB", "KL median", "KL mean", "top-1", "answers", "tokens/s"):
        table.add_column(name, justify="left" if name == "file" else "right")
    table.add_column(f"GiB at {context_tokens:,} tokens", justify="right")
    table.add_column("verdict")
    for entry in manifest["files"]:
        figures, floor = entry["figures"], entry["base_figures"]
        needed = _serving_bytes(base, figures["file_bytes"], context_tokens)
        fits = "" if device_bytes is None or needed is None else ", fits" if needed <= device_bytes else ", too large"
        table.add_row(
            entry["file"] + (f" on {entry['on_base']}" if entry["on_base"] else ""),
            f"{figures['file_bytes'] / GIB:.2f}",
            *(f"{figures[key]:.1e}" + (f" ({floor[key]:.1e})" if floor else "") for key in ("kl_median", "kl_mean")),
            f"{figures['top1']:.1%}",
            f"{figures['same_answers']}/{figures['answers']}",
            f"{figures['write_tokens_per_s']:.0f}",
            (f"{needed / GIB:.2f}" if needed else "–") + fits,
            "[green]passed[/green]" if entry["passed"] else "[bold red]FAILED[/bold red]",
        )
    return table


def _serving_bytes(base: Path, file_bytes: int, context_tokens: int) -> int | None:
    """Of a file of the base's architecture when it runs; None for one that the planner does not know."""
    from gatewright.planner.architecture import read_shape
    from gatewright.planner.serving import serving_memory
    from gatewright.spec.errors import ModelError

    try:
        shape = read_shape(base)
    except ModelError:
        return None
    return serving_memory(shape, weights_bytes=file_bytes, context_tokens=context_tokens).bytes


def _print_failures(say: Any, manifest: Mapping[str, Any]) -> None:
    proof = manifest.get("merge_proof")
    if proof and not proof["passed"]:
        say(
            f"[bold red]FAILED[/bold red] the merged model is not the base model with its adapter: median KL "
            f"{proof['median_kl']:.2g}, at most {proof['limit']:.2g}",
            highlight=False,
        )
    for entry in manifest["files"]:
        for gate in entry["gates"]:
            if not gate["passed"]:
                say(
                    f"[bold red]FAILED[/bold red] {entry['file']}: {gate['name']} {gate['value']:.3g}, at most "
                    f"{gate['limit']:.3g}",
                    highlight=False,
                )


def _figures_table(figures: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(name, shown)
    return table


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
