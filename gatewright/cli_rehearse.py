"""`plan --simulate`: the run or the question in words as a rehearsal of the trainer's own step; needs torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from gatewright.planner.ask import DEFAULT_RANK, DEFAULT_TARGETS, DEFAULT_TOKENS, known_choice, within_limits
from gatewright.planner.catalogue import find_model
from gatewright.planner.plan_run import micro_batch_tokens
from gatewright.probe.rehearsal import config_of, rehearse
from gatewright.probe.rehearsal_text import render
from gatewright.spec.errors import UserError
from gatewright.spec.run import Run

TAKEN = (
    "gpu",
    "method",
    "rank",
    "targets",
    "tokens",
    "document_tokens",
    "tokens_per_step",
    "checkpointing",
    "attention",
)
"""Options that a rehearsal follows; the GPU decides nothing, since one process is rehearsed."""
CHECKPOINTING = {"none": "none", "alternate": "selective", "full": "full"}
ATTENTION = {"flash": "flash", "sdpa": "torch_varlen"}


def print_rehearsal(run: Run, *, config: Mapping[str, Any] | None, document_tokens: int | None) -> None:
    """`config` stands in for the one in the model's folder."""
    whole = micro_batch_tokens(run)
    longest = run.data.max_tokens if isinstance(run.data.max_tokens, int) else whole
    document = min(document_tokens or longest, whole)
    lengths = [document] * (whole // document) + ([whole % document] if whole % document > 1 else [])
    rehearsal = rehearse(
        run,
        lengths=lengths,
        config=None if config is None else config_of(config),
        micro_batches=2 if run.train.tokens_per_step >= 2 * whole else 1,
    )
    typer.echo(render(rehearsal))
    typer.echo("One process: nothing is divided over GPUs.")


def run_in_words(model: str, given: Mapping[str, Any]) -> tuple[Run, Mapping[str, Any] | None]:
    """A run that trains as the options say, and the catalogue's config where the model is no folder."""
    for name in given:
        if name not in TAKEN:
            raise UserError(f"--{name.replace('_', '-')} does not go with --simulate; leave one out.")
    tokens = given.get("tokens", DEFAULT_TOKENS)
    within_limits(tokens=tokens, rank=given.get("rank"), document_tokens=given.get("document_tokens"))
    method = given.get("method", "lora")
    if method == "qlora":
        raise UserError("--simulate runs the trainer's own step, which has no 4-bit weights; leave out --method qlora.")
    known_choice("method", method, ("lora", "full"))
    checkpointing = given.get("checkpointing", "full")
    known_choice("checkpointing", checkpointing, tuple(CHECKPOINTING))
    path = Path(model)
    folder = path.parent if path.is_file() else path
    config = None if folder.is_dir() and path.exists() else find_model(model).config
    targets = given.get("targets")
    adapter = {
        "rank": given.get("rank", DEFAULT_RANK),
        "targets": [item.strip() for item in targets.split(",")] if targets else list(DEFAULT_TARGETS),
    }
    run = Run.model_validate(
        {
            "run": "rehearsal",
            "model": {"path": str(folder) if config is None else model},
            "method": {} if method == "full" else {"adapter": adapter},
            "data": {"train": "rehearsal", "max_tokens": given.get("document_tokens", tokens)},
            "train": {
                "tokens_per_step": given.get("tokens_per_step", 2 * tokens),
                "micro_batch_tokens": tokens,
                "steps": 1,
                "lr": 1e-4,
                "checkpointing": CHECKPOINTING[checkpointing],
            },
        }
    )
    return run, config
