"""Planning a run file; apart from ask.py, so that a question in words does not load the run file's validation."""

from pathlib import Path

from gatewright.planner.ask import DEFAULT_TOKENS, ask
from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.job import Layout, Sharding
from gatewright.planner.plan import answer
from gatewright.planner.search import Question
from gatewright.spec.errors import RunFileError
from gatewright.spec.plan import Plan
from gatewright.spec.run import Hardware, Parallel, Run
from gatewright.spec.shape import TensorRole


def plan_run(run: Run, *, gpus: int | None = None, price: float | None = None) -> Plan:
    """Plans a run file. `hardware` gives the GPU and, unless `gpus` does, their number."""
    return answer(ask_run(run, gpus=gpus, price=price), gpus=gpus or gpus_of(run))


def ask_run(run: Run, *, gpus: int | None = None, price: float | None = None, hours: float | None = None) -> Question:
    """The question a run file asks. Raises RunFileError where it names no hardware, or what the planner cannot take."""
    hardware, train, adapter = hardware_of(run), run.train, run.method.adapter
    if run.model.dtype != "bfloat16":
        raise RunFileError(
            f"model.dtype {run.model.dtype}: the planner's formulas hold for bfloat16. Plan with "
            "--set model.dtype=bfloat16 (about half the bytes), or add --simulate, which takes the type as it is"
        )
    folder = Path(run.model.path)
    count = gpus or gpus_of(run)
    frozen: frozenset[TensorRole] = frozenset() if run.router.train else frozenset({"router"})
    return ask(
        run.model.path if folder.exists() else find_shape(folder.name),
        gpu=find_gpu(hardware.gpu),
        per_node=hardware.per_node,
        method="full" if adapter is None else "lora",
        rank=1 if adapter is None else adapter.rank,
        targets=() if adapter is None else adapter.targets,
        storage="bf16",
        tokens=micro_batch_tokens(run),
        tokens_per_step=train.tokens_per_step,
        hours=hours,
        steps=None if hours else train.steps,
        price=price,
        layout=layout_of(run.parallel, count) if isinstance(run.parallel, Parallel) else None,
        checkpointing="alternate" if train.checkpointing == "selective" else train.checkpointing,
        optimizer="adamw_8bit" if train.optimizer == "adamw8bit" else "adamw",
        frozen=frozen,
        loss_chunk_tokens=train.loss_chunk_tokens,
    )


def hardware_of(run: Run) -> Hardware:
    if run.hardware is None:
        raise RunFileError("the run file has no hardware section; add hardware: {gpu: h200, per_node: 8, nodes: 1}")
    return run.hardware


def gpus_of(run: Run) -> int:
    hardware = hardware_of(run)
    return hardware.per_node * hardware.nodes


def micro_batch_tokens(run: Run) -> int:
    """What the trainer would take: as written, or room for the longest document within a step."""
    train, longest = run.train, run.data.max_tokens
    if isinstance(train.micro_batch_tokens, int):
        return train.micro_batch_tokens
    room = min(DEFAULT_TOKENS, train.tokens_per_step)
    return max(longest, room) if isinstance(longest, int) else room


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
