"""`plan --simulate`: a run as a rehearsal of the trainer's own step; needs torch."""

from collections.abc import Mapping
from typing import Any

import typer

from gatewright.planner.plan_run import micro_batch_tokens
from gatewright.probe.rehearsal import config_of, rehearse
from gatewright.probe.rehearsal_text import render
from gatewright.spec.run import Run


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
