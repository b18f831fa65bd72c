"""Knobs: what each setting would take off the fullest rank of a layout, by planning the run once more without it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gatewright.planner.job import Job, Layout
from gatewright.planner.legal import refusals
from gatewright.planner.legal_rule import Setting
from gatewright.planner.memory import estimate_memory
from gatewright.planner.search import Question, as_judged
from gatewright.spec.plan import Knob

LEAST_SHARE = 0.01
"""Of the peak: what saves less is not worth a line."""
LEAST_TOKENS = 256
"""A micro-batch is not halved below twice this."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One setting changed."""

    name: str
    setting: str
    was: str
    value: str
    job: Job


def knobs(question: Question, layout: Layout) -> tuple[Knob, ...]:
    """Settings that save memory in this layout, the largest saving first. What a rule forbids is left out."""
    job = as_judged(question, layout)
    now = estimate_memory(job)
    found = []
    for turn in turns(job):
        if turn.job.layout is not job.layout and is_refused(question, turn.job):
            continue
        then = estimate_memory(turn.job)
        saved = now.device.bytes - then.device.bytes
        if saved < LEAST_SHARE * now.device.bytes:
            continue
        found.append(
            Knob(
                name=turn.name,
                setting=turn.setting,
                was=turn.was,
                value=turn.value,
                saved_bytes=saved,
                allocated_bytes=then.allocated.bytes,
                device_bytes=then.device.bytes,
            )
        )
    return tuple(sorted(found, key=lambda knob: -knob.saved_bytes))


def is_refused(question: Question, job: Job) -> bool:
    cluster = question.cluster(job.layout.ranks)
    return bool(refusals(Setting(job=job, cluster=cluster, backend=question.backend, micro_batches=None)))


def turns(job: Job) -> Iterator[Turn]:
    """Every setting that can be turned here, in the words of a run file."""
    if job.checkpointing != "full":
        was = "selective" if job.checkpointing == "alternate" else job.checkpointing
        yield Turn("recompute_activations", "train.checkpointing", was, "full", replace(job, checkpointing="full"))
    if job.tokens_per_row >= 2 * LEAST_TOKENS:
        half = job.tokens_per_row // 2
        documents = min(half, job.attention_tokens) if job.attention_tokens else None
        shorter = replace(job, tokens_per_row=half, attention_tokens=documents)
        held, fewer = str(job.row_tokens), str(shorter.row_tokens)
        yield Turn("smaller_micro_batch", "train.micro_batch_tokens", held, fewer, shorter)
    if job.optimizer == "adamw":
        yield Turn("eight_bit_optimizer", "train.optimizer", "adamw", "adamw8bit", replace(job, optimizer="adamw_8bit"))
    if job.adapter is not None:
        yield from adapter_turns(job)
    yield from layout_turns(job)


def adapter_turns(job: Job) -> Iterator[Turn]:
    assert job.adapter is not None
    rank = job.adapter.rank
    if rank > 1:
        lower = replace(job, adapter=replace(job.adapter, rank=rank // 2))
        yield Turn("lower_rank", "method.adapter.rank", str(rank), str(rank // 2), lower)
    if job.storage not in ("nf4", "nf4_double", "int4", "mxfp4", "nvfp4"):
        was = "fp8" if job.storage == "fp8" else "none"
        small = replace(job, method="qlora", storage="nf4", expert_storage=None, stored={})
        yield Turn("four_bit_base", "method.quantize", was, "nf4", small)


def layout_turns(job: Job) -> Iterator[Turn]:
    layout = job.layout
    if layout.ranks > 1 and layout.sharding in ("none", "zero2"):
        was = "replicate" if layout.sharding == "none" else "zero2"
        sharded = replace(job, layout=replace(layout, sharding="fsdp2"))
        yield Turn("shard_weights", "parallel.dense", was, "zero3", sharded)
    for name, setting, size in (
        ("expert_parallelism", "parallel.ep", layout.ep),
        ("context_parallelism", "parallel.cp", layout.cp),
    ):
        twice = 2 * size
        if setting == "parallel.cp" and size > 1 and job.framework == "gatewright":
            continue  # what a rank of ours holds of documents that are cut is train.micro_batch_tokens
        if layout.ranks % twice or (setting == "parallel.ep" and (not job.shape.is_moe or job.shape.experts % twice)):
            continue
        wider = replace(layout, ep=twice) if setting == "parallel.ep" else replace(layout, cp=twice)
        yield Turn(name, setting, str(size), str(twice), replace(job, layout=wider))
