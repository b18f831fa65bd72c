"""`plan --simulate`: a run as a rehearsal of the trainer's own step; needs torch."""

from collections.abc import Mapping
from typing import Any

import typer

from gatewright.parallel.layout import layout_of
from gatewright.planner.catalogue import find_gpu
from gatewright.planner.job import worst_rank
from gatewright.planner.plan_run import gpus_of, micro_batch_tokens
from gatewright.planner.start import Devices, choose_layout
from gatewright.probe.rehearsal import config_of, rehearse
from gatewright.probe.rehearsal_text import render
from gatewright.spec.run import Run


def print_rehearsal(run: Run, *, config: Mapping[str, Any] | None, document_tokens: int | None) -> None:
    """`config` stands in for the one in the model's folder. The first rank of the run's layout is rehearsed.

    Rows of the expert-parallel rank: those of the busiest, by the planner's measured factor.
    """
    if run.hardware is not None:
        gpu = find_gpu(run.hardware.gpu)
        devices = Devices(ranks=gpus_of(run), per_node=run.hardware.per_node, device=gpu.title, gpu=gpu)
        run = choose_layout(run, devices).run
    layout = layout_of(run.parallel, ranks=1 if run.hardware is None and run.parallel == "auto" else gpus_of(run))
    whole = micro_batch_tokens(run, ranks=layout.ranks)
    longest = run.data.max_tokens if isinstance(run.data.max_tokens, int) else whole
    document = min(document_tokens or longest, whole)
    lengths = [document] * (whole // document) + ([whole % document] if whole % document > 1 else [])
    rehearsal = rehearse(
        run,
        lengths=lengths,
        config=None if config is None else config_of(config),
        micro_batches=2 if run.train.tokens_per_step >= 2 * whole * layout.ranks else 1,
        layout=layout,
        expert_load=worst_rank(layout.ep),
    )
    typer.echo(render(rehearsal))
