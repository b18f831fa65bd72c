"""The verb `plan`: a question in words or a run file, and the answer as text, JSON, page, picture or rehearsal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gatewright.cli_quiet import quiet_libraries
from gatewright.cli_write import write_whole
from gatewright.spec.errors import UserError

if TYPE_CHECKING:
    from gatewright.planner.search import Question
    from gatewright.spec.plan import Plan

MODEL, MACHINE, LENGTH, ANSWER = "What is trained", "On what", "How long, and for how much", "The answer"
IN_RUN_FILE = {
    "gpu": "hardware.gpu",
    "per_node": "hardware.per_node",
    "parallel": "parallel.ep",
    "method": "method.adapter.rank",
    "rank": "method.adapter.rank",
    "targets": "method.adapter.targets",
    "tokens": "train.micro_batch_tokens",
    "tokens_per_step": "train.tokens_per_step",
    "steps": "train.steps",
    "checkpointing": "train.checkpointing",
    "optimizer": "train.optimizer",
}
"""Options of a question in words, and the keys that say the same in a run file; it says nothing of the others."""


def _option(panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel)


def _switch(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=ANSWER)


def plan(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RUN.yaml|MODEL",
            show_default=False,
            help="A run file; or a name of `gatewright models`, a model's folder, a config.json.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file. May be repeated."),
    ] = None,
    method: Annotated[str | None, _option(MODEL, "full, lora or qlora. Default: lora.")] = None,
    rank: Annotated[int | None, _option(MODEL, "Rank of the adapters. Default: 16.")] = None,
    targets: Annotated[
        str | None,
        _option(
            MODEL,
            "Of attention, mlp, experts, shared_experts, router, embedding, head; or patterns such as *.q_proj.",
            "ROLE,...",
        ),
    ] = None,
    modules: Annotated[str | None, _option(MODEL, "Only these of the targets: q_proj,v_proj.", "NAME,...")] = None,
    storage: Annotated[
        str | None,
        _option(MODEL, "bf16, fp8, fp8-mxfp4, mxfp4, nvfp4, int8, int4, nf4, nf4-linears.", "FORMAT"),
    ] = None,
    tokens: Annotated[
        int | None,
        _option(MODEL, "Tokens of a micro-batch. Default: 4096, or 2048 or 1024 where that takes fewer GPUs."),
    ] = None,
    document_tokens: Annotated[int | None, _option(MODEL, "Tokens of each document packed into it.")] = None,
    tokens_per_step: Annotated[int | None, _option(MODEL, "Tokens of an optimizer step, all GPUs together.")] = None,
    checkpointing: Annotated[str | None, _option(MODEL, "none, per_op, alternate or full. Default: full.")] = None,
    attention: Annotated[str | None, _option(MODEL, "flash, sdpa or eager. Default: flash.")] = None,
    optimizer: Annotated[str | None, _option(MODEL, "adamw, adamw_8bit, adamw_4bit, muon or sgd.")] = None,
    framework: Annotated[
        str | None, _option(MODEL, "Whose habits count: gatewright, trl, axolotl, megatron ...")
    ] = None,
    gpu: Annotated[str | None, _option(MACHINE, "A name of `gatewright gpus`. Left out: all of them.", "NAME")] = None,
    gpus: Annotated[int | None, _option(MACHINE, "How many. Left out: the fewest that fit.")] = None,
    per_node: Annotated[int | None, _option(MACHINE, "GPUs in a node.")] = None,
    parallel: Annotated[
        str | None, _option(MACHINE, "One layout, such as ep=8,dense=zero2. Left out: all that are legal.", "LAYOUT")
    ] = None,
    backend: Annotated[
        str | None, _option(MACHINE, "Whose rules count: gatewright, deepspeed, fsdp2, megatron ...")
    ] = None,
    hours: Annotated[float | None, _option(LENGTH, "Length of the run in hours.")] = None,
    steps: Annotated[int | None, _option(LENGTH, "The same in optimizer steps.")] = None,
    price: Annotated[float | None, _option(LENGTH, "Of a GPU-hour. Default: the catalogue's.", "USD")] = None,
    calibrate: Annotated[
        Path | None, _option(LENGTH, "A run whose measured steps replace the assumed efficiency.", "runs/NAME")
    ] = None,
    compare: Annotated[
        str | None, _option(ANSWER, "Several methods side by side: lora,qlora,full.", "METHOD,...")
    ] = None,
    explain: Annotated[bool, _switch("--explain", "Print each part's formula with numbers put in.")] = False,
    as_json: Annotated[bool, _switch("--json", "Print JSON.")] = False,
    html: Annotated[Path | None, _option(ANSWER, "Write a self-contained page too.", "PATH")] = None,
    png: Annotated[Path | None, _option(ANSWER, "Write a picture too.", "PATH")] = None,
    simulate: Annotated[bool, _switch("--simulate", "Run the real step on fake tensors; needs torch.")] = False,
) -> None:
    """Say what a run will need, in bytes, seconds and dollars, and in which layout; nothing is fetched or started."""
    words = {
        "gpu": gpu, "per_node": per_node, "parallel": parallel, "method": method, "rank": rank, "targets": targets,
        "modules": modules, "storage": storage, "tokens": tokens, "document_tokens": document_tokens,
        "tokens_per_step": tokens_per_step, "steps": steps, "checkpointing": checkpointing, "attention": attention,
        "optimizer": optimizer, "framework": framework, "backend": backend,
    }  # fmt: skip
    given = {name: value for name, value in words.items() if value is not None}
    money = {name: value for name, value in (("hours", hours), ("price", price)) if value is not None}
    files = {"--html": html, "--png": png}
    _refuse_pairs(given | money, subject=subject, overrides=overrides)
    if simulate:
        many = {"--hours": hours, "--price": price, "--explain": explain}
        _refuse_with("--simulate", files | {"--json": as_json, "--compare": compare, "--calibrate": calibrate} | many)
        if gpus is not None and _is_run_file(subject):
            raise UserError(
                f"--simulate takes the GPUs of {subject}: write --set hardware.nodes=... instead of --gpus."
            )
        _rehearse(subject, given, gpus=gpus, overrides=overrides or [])
        return
    if _is_run_file(subject):
        from gatewright.planner.plan_run import ask_run, gpus_of
        from gatewright.spec.read import read_run

        run = read_run(Path(subject), overrides or [])
        gpus = gpus or gpus_of(run)
        question = ask_run(run, gpus=gpus, **money)
    elif gpu is None:
        _refuse_with("a question without --gpu", files | {"--compare": compare, "--explain": explain, "--gpus": gpus})
        _refuse_with("a question without --gpu", {"--calibrate": calibrate, "--parallel": parallel})
        _print_fewest(_ask(subject, given | money | {"gpu": "h200"}, gpus=None), as_json=as_json)
        return
    else:
        question = _ask(subject, given | money, gpus=gpus)
    plans = _answers(question, gpus=gpus, compare=compare, calibrate=calibrate)
    _write(plans, html=html, png=png)
    _print(plans, explain=explain, as_json=as_json)
    if not as_json:
        for path in filter(None, (html, png)):
            typer.echo(f"\nwritten   {path}")


def _refuse_pairs(given: dict[str, Any], *, subject: str, overrides: list[str] | None) -> None:
    """What cannot be said together."""
    if "hours" in given and "steps" in given:
        raise UserError("--hours and --steps both say how long the run is; give one of them.")
    if not _is_run_file(subject):
        if overrides:
            raise UserError(f"--set changes a run file, and {subject} is a model; say it with options (--help).")
        return
    for name in given.keys() - {"hours", "price"}:
        option, key = f"--{name.replace('_', '-')}", IN_RUN_FILE.get(name)
        instead = f"write --set {key}=... instead" if key else "a run file is planned as Gatewright would run it"
        raise UserError(f"{option} is for a question in words, and {subject} is a run file: {instead}.")


def _refuse_with(what: str, options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise UserError(f"{what} does not go with {', '.join(given)}; leave one out.")


def _is_run_file(subject: str) -> bool:
    return subject.lower().endswith((".yaml", ".yml"))


def _ask(model: str, given: dict[str, Any], *, gpus: int | None) -> Question:
    """The question in words; names of options become those of planner.ask."""
    from gatewright.planner.ask import ask, layout_from, within_limits

    words = dict(given)
    layout = None
    if parallel := words.pop("parallel", None):
        if gpus is None:
            raise UserError("--parallel divides a known number of GPUs; give --gpus too.")
        within_limits(gpus=gpus)
        layout = layout_from(parallel, ranks=gpus, backend=words.get("backend", "gatewright"))
    if (targets := words.pop("targets", None)) is not None:
        words["targets"] = _listed(targets)
    if (modules := words.pop("modules", None)) is not None:
        words["target_names"] = _listed(modules)
    return ask(model, layout=layout, **words)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _answers(question: Question, *, gpus: int | None, compare: str | None, calibrate: Path | None) -> list[Plan]:
    from dataclasses import replace

    from gatewright.planner import plan as planner

    if calibrate is not None:
        from gatewright.planner.calibrate import calibrate as read_efficiency

        question = replace(question, efficiency=read_efficiency(calibrate))
    if compare is None:
        return [planner.answer(question, gpus=gpus)]
    methods = _listed(compare)
    if not methods:
        raise UserError("--compare is empty; wanted methods such as lora,qlora,full.")
    return planner.compare(question, gpus=gpus, methods=methods)


def _write(plans: Sequence[Plan], *, html: Path | None, png: Path | None) -> None:
    """Both are drawn before either is written."""
    files: list[tuple[Path, bytes, str]] = []
    if html is not None:
        from gatewright.report.plan_page import render_page

        files.append((html, render_page(plans).encode(), "--html"))
    if png is not None:
        from gatewright.cli_png import draw
        from gatewright.report.plan_picture import picture

        files.append((png, draw(picture(plans)), "--png"))
    for path, content, option in files:
        write_whole(path, content, option=option)


def _print(plans: Sequence[Plan], *, explain: bool, as_json: bool) -> None:
    from gatewright.report import plan_text

    if as_json:
        documents = [plan_text.as_json(plan) for plan in plans]
        typer.echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2, allow_nan=False))
    elif len(plans) > 1:
        typer.echo(plan_text.render_comparison(plans), nl=False)
    else:
        typer.echo(plan_text.render_plan(plans[0], explain=explain), nl=False)


def _print_fewest(question: Question, *, as_json: bool) -> None:
    from gatewright.planner.plan import which_gpus
    from gatewright.report import plan_text

    fewest = which_gpus(question)
    if as_json:
        typer.echo(json.dumps(plan_text.fewest_as_json(fewest), indent=2, allow_nan=False))
    else:
        typer.echo(plan_text.render_fewest(fewest), nl=False)


def _rehearse(subject: str, given: dict[str, Any], *, gpus: int | None, overrides: list[str]) -> None:
    """Mistakes are found before torch is loaded."""
    if _is_run_file(subject):
        from gatewright.spec.read import read_run

        run, config = read_run(Path(subject), overrides), None
    else:
        from gatewright.planner.run_in_words import run_in_words

        run, config = run_in_words(subject, given, gpus=gpus)
    quiet_libraries()

    from gatewright.cli_rehearse import print_rehearsal

    print_rehearsal(run, config=config, document_tokens=given.get("document_tokens"))
