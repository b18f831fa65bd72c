"""Planning a run file; apart from plan.py, so that a question in words does not load the run file's validation."""

from pathlib import Path

from gatewright.planner.catalogue import find_shape
from gatewright.planner.job import Layout, Sharding
from gatewright.planner.plan import DEFAULT_TOKENS, plan
from gatewright.spec.errors import UserError
from gatewright.spec.plan import Plan
from gatewright.spec.run import Parallel, Run


def plan_run(run: Run, *, gpus: int | None = None, price: float | None = None) -> Plan:
    """Plans a run file. `hardware` gives the GPU and, unless `gpus` does, their number."""
    if run.hardware is None:
        raise UserError("the run file has no hardware section; add hardware: {gpu: h200, per_node: 8, nodes: 1}")
    folder = Path(run.model.path)
    shape = find_shape(run.model.path if folder.exists() else folder.name)
    train, adapter = run.train, run.method.adapter
    tokens = train.micro_batch_tokens if isinstance(train.micro_batch_tokens, int) else DEFAULT_TOKENS
    if train.micro_batch_tokens == "auto" and isinstance(run.data.max_tokens, int):
        tokens = run.data.max_tokens
    count = gpus or run.hardware.per_node * run.hardware.nodes
    return plan(
        shape,
        gpu=run.hardware.gpu,
        gpus=count,
        per_node=run.hardware.per_node,
        method="full" if adapter is None else "lora",
        rank=1 if adapter is None else adapter.rank,
        targets=() if adapter is None else adapter.targets,
        storage="bf16",
        tokens=min(tokens, train.tokens_per_step),
        tokens_per_step=train.tokens_per_step,
        steps=train.steps,
        price=price,
        layout=layout_of(run.parallel, count) if isinstance(run.parallel, Parallel) else None,
        checkpointing="alternate" if train.checkpointing == "selective" else train.checkpointing,
        optimizer="adamw_8bit" if train.optimizer == "adamw8bit" else "adamw",
    )


def layout_of(parallel: Parallel, ranks: int) -> Layout:
    """The layout a run file fixes. `cp: dynamic` is planned as 1: its largest size is what the search would pick."""
    dense: dict[str, Sharding] = {"replicate": "none", "zero2": "zero2", "zero3": "fsdp2"}
    return Layout(
        ranks=ranks,
        sharding=dense[parallel.dense],
        ep=parallel.ep,
        cp=parallel.cp if isinstance(parallel.cp, int) else 1,
        shard_ranks=ranks // parallel.dp_replicate if parallel.dp_replicate > 1 else None,
    )
