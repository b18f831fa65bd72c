"""The planner's answer: which layout fits, how full it is, how long it takes, what it costs, and why others fail."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from gatewright.planner.ask import (
    DEFAULT_RANK,
    DEFAULT_TARGETS,
    ask,
    known_choice,
    storages,
    within_limits,
)
from gatewright.planner.catalogue import gpus as all_gpus
from gatewright.planner.job import WORST_RANK, Adapter, Job, Method
from gatewright.planner.knobs import knobs
from gatewright.planner.memory import estimate_memory
from gatewright.planner.memory_states import trainable
from gatewright.planner.search import Found, Question, as_judged, fewest_gpus, search
from gatewright.planner.targets import adapter_of
from gatewright.planner.weights import StoredWeights
from gatewright.spec.errors import UserError
from gatewright.spec.hardware import GB, GIB, Gpu
from gatewright.spec.plan import Candidate, Plan
from gatewright.spec.shape import ModelShape

MOST_GPUS = 1024
"""Where the fewest that fit are asked for."""


def plan(model: str | ModelShape, *, gpus: int | None = None, **words: Any) -> Plan:
    """Plans a run from the words of `ask`. `gpus` None: the fewest that fit."""
    return answer(ask(model, **words), gpus=gpus)


def answer(question: Question, *, gpus: int | None) -> Plan:
    """Searches the given number of GPUs, or the fewest that fit, and gathers what a person wants to know.

    A micro-batch whose tokens were not given is halved, once or twice, where that takes fewer GPUs.
    """
    within_limits(gpus=gpus)
    best = first = _answer(question, gpus=gpus)
    for halved in (2, 4) if question.tokens_open else ():
        if best.gpus == 1 or (gpus is not None and best.chosen is not None):
            break
        job = replace(question.job, tokens_per_row=question.job.tokens_per_row // halved)
        shorter = _answer(replace(question, job=job), gpus=gpus)
        if shorter.fewest_gpus is not None and shorter.fewest_gpus < (best.fewest_gpus or MOST_GPUS + 1):
            best = shorter
    if best is first:
        return best
    wanted = f"{first.fewest_gpus} GPUs" if first.fewest_gpus else f"more than {MOST_GPUS:,} GPUs"
    return replace(best, notes=(f"micro-batches of {question.job.tokens_per_row:,} tokens want {wanted}", *best.notes))


def _answer(question: Question, *, gpus: int | None) -> Plan:
    if gpus is None:
        fewest, found = fewest_gpus(question, most=MOST_GPUS)
        gpus = fewest or MOST_GPUS
    else:
        found = search(question, gpus=gpus)
        refuse_fixed(question, found)
        open_question = replace(question, layout=None)
        fewest = None if found.fitting and gpus == 1 else fewest_gpus(open_question, most=max(gpus, 64))[0]
    subject = found.best or next(iter(found.too_large), None)
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
        knobs=knobs(question, found.layouts[subject.layout]) if subject is not None else (),
        fewest_gpus=1 if found.fitting and gpus == 1 else fewest,
        notes=(*notes(question, gpus=gpus), *stage_notes(question, found)),
    )


def refuse_fixed(question: Question, found: Found) -> None:
    """A layout that was written down and breaks a rule is a mistake, not a plan."""
    if question.layout is not None and found.illegal:
        item = found.illegal[0]
        reasons = "; ".join(f"{refusal.reason} [{refusal.rule}]" for refusal in item.refusals)
        raise UserError(f"{item.layout} cannot run: {reasons}.")


def method_text(job: Job) -> str:
    if job.adapter is None:
        parts = sorted(role for role in job.shape.parameters_by_role() if role != "mtp" and role in job.frozen)
        frozen = f", all but {', '.join(map(spaced, parts))}" if parts not in ([], ["router"]) else ""
        return f"full fine-tuning{frozen}"
    differ = job.expert_storage is not None and job.shape.is_moe
    base = f"{job.storage}, experts {job.expert_storage}" if differ else job.storage
    base += " as stored" if job.stored else ""
    kind = "QLoRA" if job.method == "qlora" else "LoRA"
    return f"{kind} rank {job.adapter.rank} on {adapter_text(job.adapter)}; base in {base}"


def adapter_text(adapter: Adapter) -> str:
    """What has an adapter, and what trains in full beside it."""
    places = sorted(adapter.names or ()) or [place_text(adapter, role) for role in sorted(adapter.roles)]
    beside = f", in full {', '.join(map(spaced, sorted(adapter.full)))}" if adapter.full else ""
    return ", ".join(places) + beside


def place_text(adapter: Adapter, role: str) -> str:
    """`attention (q_proj)` where only some modules are adapted, `routed experts (25%)` where only some experts are."""
    shares = {name: share for (of, name), share in adapter.shares.items() if of == role}
    if not shares:
        return spaced(role)
    if role in adapter.partly:
        return f"{spaced(role)} ({', '.join(sorted(shares))})"
    return f"{spaced(role)} ({min(shares.values()):.0%})"


def spaced(role: str) -> str:
    return role.replace("_", " ")


def near_misses(found: Found) -> tuple[Candidate, ...]:
    """The three that come closest to fitting, and one for each rule that was broken."""
    by_rule: dict[str, Candidate] = {}
    for item in found.illegal:
        by_rule.setdefault(item.refusals[0].rule, item)
    return (*found.too_large[:3], *list(by_rule.values())[:3])


def notes(question: Question, *, gpus: int) -> tuple[str, ...]:
    job = question.job
    lines = [
        f"micro-batch {job.rows} × {job.tokens_per_row:,} tokens, {question.step_tokens(gpus):,} tokens a step; "
        f"checkpointing {job.checkpointing}, attention {job.attention}, optimizer {job.optimizer}"
    ]
    if question.weights is not None:
        lines.append(stored_text(question.weights, exact=bool(job.stored), loaded=job.storage))
    if job.shape.quantization is not None and job.shape.storage is None and not job.stored and job.method == "lora":
        lines.append(
            f"the config says {job.shape.quantization}, whose bytes are not known here: planned as {job.storage}; "
            "point at a folder with the safetensors files, or say --storage"
        )
    if job.shape.mtp_parameters:
        lines.append(f"{job.shape.mtp_parameters / 1e9:.1f} B parameters of MTP layers are not loaded")
    if job.shape.is_moe:
        lines.append(
            "memory follows all parameters, never the active ones; where EP divides the experts, the busiest rank is "
            f"planned with {WORST_RANK[0][1]:g} to {WORST_RANK[-1][1]:g} times the mean of the tokens"
        )
    return tuple(lines)


def stage_notes(question: Question, found: Found) -> tuple[str, ...]:
    """What the ranks of each pipeline stage of the chosen layout allocate; the fullest is the one that is drawn."""
    layout = found.layouts[found.best.layout] if found.best else None
    if layout is None or layout.pp == 1:
        return ()
    job = as_judged(question, layout)
    peaks = [estimate_memory(job, stage=stage).allocated.bytes / GIB for stage in range(layout.pp)]
    return (f"allocated by pipeline stage, GiB: {', '.join(f'{peak:.1f}' for peak in peaks)}",)


def stored_text(weights: StoredWeights, *, exact: bool, loaded: str) -> str:
    """What the checkpoint's headers say, and whether the plan rests on it."""
    types = ", ".join(f"{dtype} {size / GB:.2f} GB" for dtype, size in list(weights.bytes_by_dtype.items())[:4])
    used = "frozen weights are these bytes" if exact else f"planned as {loaded}"
    return f"{weights.tensors:,} tensors in {weights.files} files of {weights.path}: {types}; {used}"


def compare(question: Question, *, gpus: int | None, methods: Sequence[str]) -> list[Plan]:
    """The same question for several methods; its own keeps its storage, LoRA and QLoRA share an adapter."""
    return [answer(replace(question, job=with_method(question.job, method)), gpus=gpus) for method in methods]


def with_method(job: Job, name: str) -> Job:
    known_choice("method", name, get_args(Method))
    method = cast(Method, name)
    if method == job.method:
        return job
    dense, experts = storages(job.shape, method=method, name=None)
    adapter = job.adapter or adapter_of(job.shape, rank=DEFAULT_RANK, targets=DEFAULT_TARGETS)
    return replace(
        job,
        method=method,
        storage=dense,
        expert_storage=experts,
        stored={},
        adapter=None if method == "full" else adapter,
    )


def which_gpus(question: Question, *, most: int = 64) -> list[tuple[Gpu, int | None]]:
    """Every GPU of the catalogue with the fewest that fit; None: not even `most`."""
    return [
        (gpu, fewest_gpus(replace(question, gpu=gpu, per_node=gpu.per_node, layout=None), most=most)[0])
        for gpu in all_gpus()
    ]
