"""Planning a run file; apart from ask.py, so that a question in words does not load the run file's validation."""

from pathlib import Path
from typing import Any

from gatewright.planner.ask import ask
from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.job import Layout, Sharding
from gatewright.planner.plan import answer
from gatewright.planner.search import Question
from gatewright.planner.targets import trained_roles
from gatewright.spec.auto import AUTO_MICRO_BATCH_TOKENS
from gatewright.spec.errors import RunFileError
from gatewright.spec.plan import Plan
from gatewright.spec.run import ExpertSubset, Hardware, Parallel, Run
from gatewright.spec.shape import ROLES, ModelShape, TensorRole

STORAGE = {"none": "bf16", "nf4": "nf4", "fp8": "fp8"}
"""method.quantize, in the planner's words."""


def plan_run(run: Run, *, gpus: int | None = None, price: float | None = None) -> Plan:
    """Plans a run file. `hardware` gives the GPU and, unless `gpus` does, their number."""
    return answer(ask_run(run, gpus=gpus, price=price), gpus=gpus or gpus_of(run))


def ask_run(run: Run, *, gpus: int | None = None, price: float | None = None, hours: float | None = None) -> Question:
    """The question a run file asks. Raises RunFileError where it names no hardware, or what the planner cannot take."""
    hardware, train = hardware_of(run), run.train
    if run.model.dtype != "bfloat16":
        raise RunFileError(
            f"model.dtype {run.model.dtype}: the planner's formulas hold for bfloat16. Plan with "
            "--set model.dtype=bfloat16 (about half the bytes), or add --simulate, which takes the type as it is"
        )
    folder = Path(run.model.path)
    count = gpus or gpus_of(run)
    shape = find_shape(run.model.path if folder.exists() else folder.name)
    if folder.exists():
        refuse_storage(run, shape)
    return ask(
        run.model.path if folder.exists() else shape,
        gpu=find_gpu(hardware.gpu),
        per_node=hardware.per_node,
        tokens=micro_batch_tokens(run, ranks=count) * shared_by(run, ranks=count),
        tokens_per_step=train.tokens_per_step,
        hours=hours,
        steps=None if hours else train.steps,
        price=price,
        layout=layout_of(run, count),
        checkpointing="alternate" if train.checkpointing == "selective" else train.checkpointing,
        optimizer="adamw_8bit" if train.optimizer == "adamw8bit" else "adamw",
        loss_chunk_tokens=train.loss_chunk_tokens,
        **method_words(run, shape),
    )


def refuse_storage(run: Run, shape: ModelShape) -> None:
    """Raises RunFileError for a base that the trainer would refuse to load as asked."""
    held = shape.quantization
    if held is not None and shape.storage not in ("fp8", "mxfp4"):
        raise RunFileError(
            f"model.path: {run.model.path} is quantised already ({held}); as a base for training we read plain floats, "
            "FP8 and MXFP4. Point it at the model's unquantised or FP8 release"
        )
    if run.method.quantize == "fp8" and shape.storage != "fp8":
        raise RunFileError(
            f"method.quantize: fp8 keeps the bytes of an FP8 checkpoint, but {run.model.path} holds "
            f"{held or 'plain floats'}; set nf4 or none, or point model.path at the model's FP8 release"
        )


def method_words(run: Run, shape: ModelShape) -> dict[str, Any]:
    """What trains and how the rest is stored, in the words of `ask`."""
    adapter = run.method.adapter
    if adapter is None:
        return {"method": "full", "storage": "bf16", "frozen": frozen_roles(run, shape)}
    router = ["router"] if run.router.train and shape.is_moe and "router" not in adapter.full else []
    return {
        "method": "qlora" if run.method.quantize == "nf4" else "lora",
        "storage": STORAGE[run.method.quantize],
        "rank": adapter.rank,
        "targets": adapter.targets,
        "trained": [*adapter.full, *router],
        "expert_share": expert_share(adapter.experts, shape),
        "expert_numbers": expert_numbers(run),
        "dropout": adapter.dropout > 0,
    }


def frozen_roles(run: Run, shape: ModelShape) -> frozenset[TensorRole]:
    """Roles that full fine-tuning leaves as they are: those not named, or the router alone."""
    trained = frozenset(ROLES) - {"router"}
    if run.method.roles is not None:
        trained = trained_roles(shape, run.method.roles)
    if run.router.train:
        trained |= {"router"}
    return frozenset(ROLES) - trained


def expert_share(subset: ExpertSubset | None, shape: ModelShape) -> float:
    """Part of the model's experts that has an adapter. Raises RunFileError for experts that are not there."""
    if subset is None:
        return 1.0
    if subset.layers is None:
        return subset.most_routed or 1.0
    held = {index: layer.mlp.experts for index, layer in enumerate(shape.layers) if layer.mlp and layer.mlp.experts}
    for item in subset.layers:
        experts = held.get(item.layer, 0)
        if max(item.experts) >= experts:
            what = f"experts 0 to {experts - 1}" if experts else "no routed experts"
            raise RunFileError(
                f"method.adapter.experts.layers: layer {item.layer} of {shape.name} has {what}, "
                f"and expert {max(item.experts)} is named"
            )
    return sum(len(set(item.experts)) for item in subset.layers) / sum(held.values())


def expert_numbers(run: Run) -> list[list[int]]:
    """The experts that the run file names for an adapter, by layer, where their numbers tell on which rank they lie."""
    subset = run.method.adapter.experts if run.method.adapter else None
    if subset is None or subset.layers is None or run.router.placement != "contiguous":
        return []
    return [sorted(set(item.experts)) for item in subset.layers]


def hardware_of(run: Run) -> Hardware:
    if run.hardware is None:
        raise RunFileError("the run file has no hardware section; add hardware: {gpu: h200, per_node: 8, nodes: 1}")
    return run.hardware


def gpus_of(run: Run) -> int:
    hardware = hardware_of(run)
    return hardware.per_node * hardware.nodes


def micro_batch_tokens(run: Run, *, ranks: int) -> int:
    """What a rank of the trainer would hold at a time: as written, or room for the longest document within a step.

    Documents that are cut over ranks need room for their part only.
    """
    train, longest = run.train, run.data.max_tokens
    if isinstance(train.micro_batch_tokens, int):
        return train.micro_batch_tokens
    room = min(AUTO_MICRO_BATCH_TOKENS, train.tokens_per_step)
    if not isinstance(longest, int):
        return room
    return max(room, -(-longest // ranks) if cuts(run) else longest)


def cuts(run: Run) -> bool:
    """Whether documents are cut over ranks."""
    return isinstance(run.parallel, Parallel) and run.parallel.cp != 1


def shared_by(run: Run, *, ranks: int) -> int:
    """Ranks that share a document: as written; with `dynamic` the fewest that hold the longest one."""
    if run.parallel == "auto":
        return 1
    if run.parallel.cp != "dynamic":
        return run.parallel.cp
    longest, room = run.data.max_tokens, micro_batch_tokens(run, ranks=ranks)
    if not isinstance(longest, int):
        return 1
    return next((size for size in range(1, ranks + 1) if ranks % size == 0 and size * room >= longest), ranks)


def layout_of(run: Run, ranks: int) -> Layout | None:
    """The layout a run file fixes; None: the planner is asked for it."""
    parallel = run.parallel
    if parallel == "auto":
        return None
    dense: dict[str, Sharding] = {"replicate": "none", "zero2": "zero2", "zero3": "fsdp2"}
    return Layout(
        ranks=ranks,
        sharding=dense[parallel.dense],
        ep=parallel.ep,
        cp=shared_by(run, ranks=ranks),
        shard_ranks=ranks // parallel.dp_replicate if parallel.dp_replicate > 1 else None,
    )
