"""Each rule of legality, broken and kept."""

from dataclasses import replace

import pytest

from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.job import Adapter, Job, Layout
from gatewright.planner.legal import RULES, advice, refusals
from gatewright.planner.legal_rule import Setting
from gatewright.spec.hardware import Cluster, Node

MOE, DENSE = find_shape("Qwen3-30B-A3B"), find_shape("Qwen3-8B")
ADAPTER = Adapter(rank=8, roles=frozenset({"attention"}))
LORA = Job(shape=MOE, method="lora", adapter=ADAPTER)
FULL = Job(shape=MOE, method="full")


def at(job: Job, *, gpu: str = "h200", nodes: int = 1, **rest: object) -> Setting:
    cluster = Cluster(node=Node(gpu=find_gpu(gpu), gpus=8), nodes=nodes)
    return Setting(job=job, cluster=cluster, **rest)  # type: ignore[arg-type]


def laid(job: Job, **sizes: object) -> Job:
    return replace(job, layout=Layout(**{"ranks": 8, **sizes}))  # type: ignore[arg-type]


BROKEN = {
    "ranks-divide": at(laid(FULL, tp=3), backend="megatron"),
    "ep-needs-experts": at(laid(replace(FULL, shape=DENSE), ep=8)),
    "ep-divides-experts": at(laid(FULL, ranks=6, ep=6)),
    "ep-divides-ranks": at(laid(FULL, ep=16)),
    "zero3-with-native-moe": at(laid(FULL, ep=8, sharding="zero3"), backend="deepspeed"),
    "zero3-with-autoep": at(laid(FULL, ep=4, tp=2, sharding="zero3"), backend="deepspeed-autoep"),
    "fsdp1-with-ep": at(laid(FULL, ep=8, sharding="fsdp1"), backend="fsdp1"),
    "heads-divide": at(laid(replace(FULL, shape=find_shape("Qwen2.5-0.5B")), tp=8), backend="megatron"),
    "tp-within-node": at(laid(FULL, ranks=16, tp=16), nodes=2, backend="megatron"),
    "etp-only-for-large-experts": at(laid(FULL, ep=4, etp=2), backend="megatron"),
    "pp-within-layers": at(laid(FULL, ranks=64, pp=64), nodes=8, backend="megatron"),
    "dp-needs-micro-batches": at(laid(FULL), micro_batches=0),
    "pp-needs-micro-batches": at(laid(FULL, pp=8), micro_batches=4, backend="megatron"),
    "pp-with-zero23": at(laid(FULL, pp=2, sharding="zero2"), backend="deepspeed"),
    "pp-unsupported": at(laid(FULL, pp=2)),
    "tp-unsupported": at(laid(FULL, tp=2)),
    "cp-divides-tokens": at(laid(replace(FULL, tokens_per_row=1024), cp=8), backend="megatron"),
    "cp-changed-scores": at(laid(replace(FULL, shape=find_shape("gpt-oss-20b")), cp=2)),
    "cp-with-eager": at(laid(replace(FULL, attention="eager"), cp=2)),
    "full-needs-wide-weights": at(laid(replace(FULL, storage="fp8"))),
    "eight-bit-with-dtensor": at(laid(replace(FULL, optimizer="adamw_8bit"), sharding="fsdp2"), backend="fsdp2"),
    "cp-through-attention": at(laid(replace(FULL, shape=find_shape("Qwen3-Next-80B-A3B-Instruct")), cp=2)),
    "four-bit-with-fsdp": at(laid(replace(LORA, method="qlora", storage="nf4"), sharding="fsdp2"), backend="fsdp2"),
    "fp8-without-units": at(laid(replace(LORA, storage="fp8")), gpu="mi250x-gcd"),
    "ep-across-nodes": at(laid(LORA, ranks=16, ep=16), nodes=2),
    "ep-or-gather": at(laid(replace(LORA, tokens_per_row=32768), ep=8)),
    "zero2-replicates-frozen": at(laid(LORA, sharding="zero2")),
    "stage-table": at(laid(FULL, sharding="zero3"), gpu="mi250x-gcd"),
}


@pytest.mark.parametrize(
    "shape",
    ["Qwen3-8B", "Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "DeepSeek-V3", "gemma-3-1b-pt", "Phi-3-mini-4k-instruct"],
)
def test_what_the_trainer_proves_over_ranks_is_legal(shape: str) -> None:
    """docs/context_parallel.md: sliding windows and latent attention too; short documents are cut as well."""
    setting = at(laid(replace(FULL, shape=find_shape(shape), tokens_per_row=512), cp=8))
    assert [item.rule for item in refusals(setting) if item.rule.startswith("cp")] == []


@pytest.mark.parametrize(
    "shape",
    [
        "Qwen3-Next-80B-A3B-Instruct",
        "Qwen3.5-35B-A3B",
        "DeepSeek-V3.2",
        "gpt-oss-20b",
        "gemma-2-9b",
        "Llama-4-Scout-17B-16E",
    ],
)
def test_what_the_trainer_refuses_over_ranks_is_not(shape: str) -> None:
    setting = at(laid(replace(FULL, shape=find_shape(shape)), cp=2))
    assert any(item.rule in ("cp-through-attention", "cp-changed-scores") for item in refusals(setting))


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_each_rule_speaks_when_broken(rule: str) -> None:
    setting = BROKEN[rule]
    found = {item.rule: item for item in (*refusals(setting), *advice(setting))}
    assert rule in found
    assert any(character.isdigit() for character in found[rule].reason) or rule == "cp-with-eager"
    assert found[rule].backend


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_each_rule_is_silent_on_a_plain_single_gpu_run(rule: str) -> None:
    for job in (replace(FULL, layout=Layout()), replace(LORA, layout=Layout())):
        assert rule not in {item.rule for item in (*refusals(at(job)), *advice(at(job)))}


def test_ids_are_unique_and_every_rule_has_a_case() -> None:
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids)) and set(ids) == set(BROKEN)
    assert all(rule.title and rule.version and rule.source for rule in RULES)


@pytest.mark.parametrize(
    ("backend", "sharding", "allowed"),
    [
        ("deepspeed", "zero3", False),
        ("deepspeed", "zero2", True),
        ("deepspeed-autoep", "zero3", True),
        ("fsdp1", "fsdp1", False),
        ("fsdp2", "fsdp2", True),
        ("gatewright", "fsdp2", True),
    ],
)
def test_sharded_weights_with_ep_depend_on_the_backend(backend: str, sharding: str, allowed: bool) -> None:
    setting = at(laid(FULL, ep=8, sharding=sharding), backend=backend)
    assert (refusals(setting) == ()) is allowed


def test_break_even_of_ep_and_gather_is_18432_tokens_for_qwen3_30b() -> None:
    reason = advice(BROKEN["ep-or-gather"])[0].reason
    assert "18,432" in reason
    assert not any(item.rule == "ep-or-gather" for item in advice(at(laid(replace(LORA, tokens_per_row=18432), ep=8))))
