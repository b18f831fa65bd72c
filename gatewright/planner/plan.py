"""The planner's answer: which layout fits, how full it is, how long it takes, what it costs, and why others fail."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.catalogue import gpus as all_gpus
from gatewright.planner.job import (
    Adapter,
    AttentionKernel,
    Checkpointing,
    Job,
    Layout,
    Method,
    Optimizer,
    Storage,
)
from gatewright.planner.legal_rule import Backend
from gatewright.planner.search import Found, Question, fewest_gpus, search
from gatewright.planner.weights import FORMATS, native_format
from gatewright.spec.errors import ModelError, UserError
from gatewright.spec.hardware import Gpu
from gatewright.spec.plan import Candidate, Plan
from gatewright.spec.shape import TARGET_ROLES, ModelShape, TensorRole

MOST_GPUS = 1024
DEFAULT_TOKENS = 4096
DEFAULT_MICRO_BATCHES = 16
"""Micro-batches a step where the question gives no tokens_per_step."""


def plan(
    model: str | ModelShape,
    *,
    gpu: str | Gpu,
    gpus: int | None = None,
    per_node: int | None = None,
    method: Method = "lora",
    rank: int = 16,
    targets: Sequence[str] = ("attention",),
    target_names: Iterable[str] | None = None,
    storage: str | None = None,
    tokens: int = DEFAULT_TOKENS,
    document_tokens: int | None = None,
    tokens_per_step: int | None = None,
    hours: float | None = None,
    steps: int | None = None,
    price: float | None = None,
    framework: str = "gatewright",
    backend: Backend = "gatewright",
    layout: Layout | None = None,
    checkpointing: Checkpointing = "full",
    attention: AttentionKernel = "flash",
    optimizer: Optimizer = "adamw",
) -> Plan:
    """Plans a run from words: a catalogue name or path, a GPU, a method.

    `gpus` None asks for the fewest. `storage` names one of weights.FORMATS (bf16, fp8, fp8-mxfp4, nf4, nf4-linears …);
    None takes the checkpoint's own for LoRA and nf4 for QLoRA. Raises UserError or ModelError with the nearest choice.
    """
    shape = find_shape(model) if isinstance(model, str) else model
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    positive(gpus=gpus, per_node=per_node, rank=rank, tokens=tokens, tokens_per_step=tokens_per_step, steps=steps)
    above_zero(hours=hours, price=price)
    dense, experts = storages(shape, method=method, name=storage)
    adapter = None
    if method != "full":
        names = None if target_names is None else frozenset(target_names)
        adapter = Adapter(rank=rank, roles=roles_of(shape, targets), names=names)
    job = Job(
        shape=shape,
        method=method,
        framework=framework,
        adapter=adapter,
        storage=dense,
        expert_storage=experts,
        frozen=frozenset({"router"}),
        tokens_per_row=tokens,
        attention_tokens=document_tokens,
        checkpointing=checkpointing,
        attention=attention,
        loss="linear" if framework == "gatewright" else "full",
        optimizer=optimizer,
    )
    question = Question(
        job=job,
        gpu=device,
        per_node=per_node or device.per_node,
        tokens_per_step=tokens_per_step or tokens * DEFAULT_MICRO_BATCHES,
        backend=backend,
        layout=layout,
        hours=hours,
        steps=steps,
        usd_per_gpu_hour=price,
    )
    return answer(question, gpus=gpus)


def positive(**values: int | None) -> None:
    wrong = {name: value for name, value in values.items() if value is not None and value < 1}
    if wrong:
        name, value = next(iter(wrong.items()))
        raise UserError(f"{name} {value}: wanted a whole number of at least 1.")


def above_zero(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} {value:g}: wanted a number above 0.")


def storages(shape: ModelShape, *, method: Method, name: str | None) -> tuple[Storage, Storage | None]:
    """How frozen matrices are stored: (dense, experts where they differ)."""
    if method == "full":
        return "bf16", None
    key = name or ("nf4" if method == "qlora" else native_format(shape))
    if key not in FORMATS:
        raise ModelError(f"No storage is called {key!r}. Known: {', '.join(FORMATS)}.")
    stored = FORMATS[key]
    return stored.dense, None if stored.experts == stored.dense else stored.experts


def roles_of(shape: ModelShape, targets: Sequence[str]) -> frozenset[TensorRole]:
    """Tensor roles behind the targets. Raises UserError for an unknown one, or one this model does not have."""
    roles: set[TensorRole] = set()
    present = set(shape.parameters_by_role())
    for target in targets:
        if target not in TARGET_ROLES:
            raise UserError(f"No target is called {target!r}. Known: {', '.join(TARGET_ROLES)}.")
        found = present.intersection(TARGET_ROLES[target])
        if not found:
            has = ", ".join(name for name, behind in TARGET_ROLES.items() if present.intersection(behind))
            raise UserError(f"{shape.name} has no {target} to adapt; it has: {has}.")
        roles.update(found)
    return frozenset(roles)


def answer(question: Question, *, gpus: int | None) -> Plan:
    """Searches the given number of GPUs, or the fewest that fit, and gathers what a person wants to know."""
    if gpus is None:
        fewest, found = fewest_gpus(question, most=MOST_GPUS)
        gpus = fewest or MOST_GPUS
    else:
        found = search(question, gpus=gpus)
        open_question = replace(question, layout=None)
        fewest = None if found.fitting and gpus == 1 else fewest_gpus(open_question, most=max(gpus, 64))[0]
    return Plan(
        model=question.job.shape.name,
        parameters=question.job.shape.parameters,
        trainable_parameters=trainable(question.job),
        method=method_text(question.job),
        gpu=question.gpu.name,
        gpus=gpus,
        gpu_memory_bytes=question.gpu.memory_bytes,
        capacity_bytes=question.capacity_bytes,
        chosen=found.best,
        alternatives=found.fitting[1:5],
        rejected=near_misses(found),
        fewest_gpus=1 if found.fitting and gpus == 1 else fewest,
        notes=notes(question),
    )


def trainable(job: Job) -> int:
    if job.adapter is None:
        return sum(
            group.parameters for group in job.shape.groups if group.role != "mtp" and group.role not in job.frozen
        )
    return job.shape.lora_parameters(job.adapter.rank, roles=job.adapter.roles, names=job.adapter.names)


def method_text(job: Job) -> str:
    if job.adapter is None:
        return "full fine-tuning"
    where = ", ".join(sorted(job.adapter.names or job.adapter.roles)).replace("_", " ")
    base = job.storage if job.expert_storage is None else f"{job.storage}, experts {job.expert_storage}"
    return f"{'QLoRA' if job.method == 'qlora' else 'LoRA'} rank {job.adapter.rank} on {where}; base in {base}"


def near_misses(found: Found) -> tuple[Candidate, ...]:
    """The three that come closest to fitting, and one for each rule that was broken."""
    by_rule: dict[str, Candidate] = {}
    for item in found.illegal:
        by_rule.setdefault(item.refusals[0].rule, item)
    return (*found.too_large[:3], *list(by_rule.values())[:3])


def notes(question: Question) -> tuple[str, ...]:
    job = question.job
    lines = [
        f"micro-batch {job.rows} × {job.tokens_per_row:,} tokens, {question.tokens_per_step:,} tokens a step; "
        f"checkpointing {job.checkpointing}, attention {job.attention}, optimizer {job.optimizer}"
    ]
    if job.shape.mtp_parameters:
        lines.append(f"{job.shape.mtp_parameters / 1e9:.1f} B parameters of MTP layers are not loaded")
    if job.shape.is_moe:
        lines.append("memory follows all parameters, never the active ones; routing is taken as even")
    return tuple(lines)


def compare(question: Question, *, gpus: int | None, methods: Sequence[Method]) -> list[Plan]:
    """The same question for several methods; LoRA's adapter serves QLoRA."""
    plans = []
    for method in methods:
        dense, experts = storages(question.job.shape, method=method, name=None)
        adapter = None if method == "full" else question.job.adapter
        job = replace(question.job, method=method, storage=dense, expert_storage=experts, adapter=adapter)
        plans.append(answer(replace(question, job=job), gpus=gpus))
    return plans


def which_gpus(question: Question, *, most: int = 64) -> list[tuple[Gpu, int | None]]:
    """Every GPU of the catalogue with the fewest that fit; None: not even `most`."""
    return [
        (gpu, fewest_gpus(replace(question, gpu=gpu, per_node=gpu.per_node, layout=None), most=most)[0])
        for gpu in all_gpus()
    ]
