"""What a run file says of what trains and how the rest is stored, as the planner takes it, or refuses it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gatewright.planner.ask import ask
from gatewright.planner.catalogue import find_model, find_shape
from gatewright.planner.job import BYTES_PER_WEIGHT
from gatewright.planner.memory_states import trainable
from gatewright.planner.plan import notes
from gatewright.planner.plan_run import ask_run, plan_run
from gatewright.planner.quantization_config import storage_format
from gatewright.planner.search import Question
from gatewright.spec.errors import GatewrightError
from gatewright.spec.run import Run
from gatewright.spec.shape import ModelShape, TensorRole

MOE = "Qwen3-30B-A3B"
SHAPE = find_shape(MOE)
LAYERS, EXPERTS = len(SHAPE.layers), SHAPE.experts
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
}


def question(method: dict[str, Any] | None = None, *, model: str = MOE, **sections: Any) -> Question:
    return ask_run(run(method, model=model, **sections), gpus=8)


def run(method: dict[str, Any] | None = None, *, model: str = MOE, **sections: Any) -> Run:
    values = {
        "run": "r",
        "model": {"path": model},
        "method": {"adapter": {"rank": 16}} if method is None else method,
        "data": {"train": "d.jsonl", "max_tokens": 4096},
        "train": {"tokens_per_step": 65536, "steps": 10, "lr": 1e-4},
        "hardware": {"gpu": "h200", "per_node": 8},
    }
    return Run.model_validate(values | sections)


def adapter(**values: Any) -> dict[str, Any]:
    return {"adapter": {"rank": 16, **values}}


def lora(*roles: TensorRole, names: tuple[str, ...] | None = None, shape: ModelShape = SHAPE) -> int:
    return shape.lora_parameters(16, roles=roles, names=names)


def parameters(*roles: TensorRole) -> int:
    by_role = SHAPE.parameters_by_role()
    return sum(by_role[role] for role in roles)


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (adapter(targets=["experts"]), lora("routed_experts")),
        (adapter(targets=["*.q_proj"]), lora("attention", names=("q_proj",))),
        (adapter(targets=["model.layers.0.*.q_proj"]), lora("attention", names=("q_proj",)) // LAYERS),
        (adapter(targets=["attention", "*.q_proj"]), lora("attention")),
        (adapter(targets=["router"]), LAYERS * 16 * (SHAPE.hidden + EXPERTS)),
        (adapter(targets=["head"]), 16 * (SHAPE.hidden + SHAPE.vocab)),
        (adapter(targets=["embedding"]), 16 * (SHAPE.hidden + SHAPE.vocab)),
        (adapter(targets=["experts"], experts={"most_routed": 0.25}), lora("routed_experts") // 4),
        (
            adapter(targets=["experts"], experts={"layers": [{"layer": 3, "experts": [0, 5]}]}),
            lora("routed_experts") * 2 // (LAYERS * EXPERTS),
        ),
        (adapter(targets=["attention"], full=["router", "norm"]), lora("attention") + parameters("router", "norms")),
        ({"roles": ["experts", "norm"]}, parameters("routed_experts", "norms")),
        ({}, SHAPE.parameters - parameters("router")),
    ],
)
def test_what_trains_is_counted(method: dict[str, Any], count: int) -> None:
    assert trainable(question(method).job) == count


def test_a_router_that_trains_is_counted_beside_an_adapter_and_beside_roles() -> None:
    router = parameters("router")
    train = {"router": {"train": True, "balance": 0.01, "guard": {"action": ["freeze"]}, "capacity": 1.25}}
    assert trainable(question(adapter(targets=["attention"]), **train).job) == lora("attention") + router
    assert trainable(question({"roles": ["norm"]}, **train).job) == parameters("norms") + router
    assert (
        trainable(question(adapter(targets=["attention"], full=["router"]), **train).job) == lora("attention") + router
    )


def test_weights_that_train_beside_an_adapter_have_float32_weights_gradients_and_state() -> None:
    plain = plan_run(run(adapter(targets=["attention"])), gpus=1).chosen
    beside = plan_run(run(adapter(targets=["attention"], full=["embedding"])), gpus=1).chosen
    assert plain is not None and plain.memory is not None and beside is not None and beside.memory is not None
    more = beside.memory.resident_bytes - plain.memory.resident_bytes
    assert more == pytest.approx(parameters("embedding") * (4 + 8 - 2), rel=1e-6)


def test_fewer_experts_with_an_adapter_are_fewer_bytes() -> None:
    whole, part = (
        plan_run(run(adapter(targets=["experts"], **more)), gpus=1).chosen
        for more in ({}, {"experts": {"most_routed": 0.5}})
    )
    assert whole is not None and whole.memory is not None and part is not None and part.memory is not None
    saved = whole.memory.resident_bytes - part.memory.resident_bytes
    assert saved == pytest.approx(lora("routed_experts") / 2 * 12, rel=1e-6)


@pytest.mark.parametrize(("placement", "adapted"), [("contiguous", 3 * 3), ("measured", 3 * 4 / 8)])
def test_named_experts_cost_the_rank_that_has_most_of_them(placement: str, adapted: float) -> None:
    """Four of 128 experts in each of three layers: three of four on one rank, or an even part, by measured loads."""
    layers = [{"layer": layer, "experts": [16, 17, 31, 127]} for layer in (0, 5, 9)]
    asked = run(
        adapter(targets=["experts"], experts={"layers": layers}), router={"placement": placement}, parallel={"ep": 8}
    )
    chosen = plan_run(asked, gpus=8).chosen
    assert chosen is not None and chosen.memory is not None
    [adapters] = [part.bytes for part in chosen.memory.phases[0].parts if part.name == "adapters"]
    one_expert = lora("routed_experts") / (48 * 128)
    assert adapters == pytest.approx(adapted * one_expert * 4, rel=1e-6)


@pytest.mark.parametrize(("quantize", "bytes_per_weight"), [("nf4", "nf4_double"), ("fp8", "fp8"), ("none", "bf16")])
def test_the_frozen_base_is_stored_as_the_run_says(quantize: str, bytes_per_weight: Any) -> None:
    chosen = plan_run(run({**adapter(targets=["attention"]), "quantize": quantize}), gpus=1).chosen
    assert chosen is not None and chosen.memory is not None
    [frozen] = [part.bytes for part in chosen.memory.phases[0].parts if part.name == "frozen weights"]
    experts = parameters("routed_experts") * BYTES_PER_WEIGHT[bytes_per_weight]
    assert 0 < frozen - experts < 2.5 * (SHAPE.parameters - parameters("routed_experts"))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (adapter(targets=["*.zzz"]), "matches no module that the planner knows"),
        (adapter(targets=["router"], full=["router"]), "named both for an adapter and to train in full"),
        (
            adapter(experts={"layers": [{"layer": 99, "experts": [0]}]}),
            "layer 99 of Qwen3-30B-A3B has no routed experts",
        ),
        (
            adapter(experts={"layers": [{"layer": 1, "experts": [128]}]}),
            "has experts 0 to 127, and expert 128 is named",
        ),
        ({"roles": ["shared_experts"]}, "has no shared_experts to train"),
    ],
)
def test_what_the_model_does_not_have_is_one_sentence(method: dict[str, Any], says: str) -> None:
    with pytest.raises(GatewrightError) as caught:
        question(method)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_tied_head_cannot_be_adapted() -> None:
    with pytest.raises(GatewrightError, match="has no head to adapt: its head is its embedding"):
        question(adapter(targets=["head"]), model="Qwen3-0.6B")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "gptq", "bits": 3}, None),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4-linears"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (COMPRESSED, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, None),
        ({"quant_method": "hqq"}, None),
        ({"quant_method": ["gptq"], "bits": {}}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_quantised_config_without_weights(settings: dict[str, Any], wanted: str | None) -> None:
    assert storage_format(settings) == wanted


def test_an_unknown_quantisation_is_planned_in_16_bits_and_said(tmp_path: Path) -> None:
    texts = []
    for method in ("gptq", "hqq"):
        config = {**find_model("Qwen3-8B").config, "quantization_config": {"quant_method": method, "bits": 4}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        texts.append("\n".join(notes(ask(str(tmp_path), gpu="h200"), gpus=1)))
    assert "not known here" not in texts[0] and "the config says hqq" in texts[1]


@pytest.mark.parametrize(
    ("parallel", "train", "cp", "rank_tokens"),
    [
        ({"cp": 4}, {"micro_batch_tokens": 16384}, 4, 16384),
        ({"cp": 8}, {}, 8, 16384),
        ({"cp": "dynamic"}, {"micro_batch_tokens": 32768}, 4, 32768),
        ({"cp": "dynamic"}, {}, 8, 16384),
        ({"cp": 1}, {}, 1, 131072),
    ],
)
def test_a_rank_holds_its_part_of_a_document_that_is_cut(
    parallel: dict[str, Any], train: dict[str, Any], cp: int, rank_tokens: int
) -> None:
    """micro_batch_tokens is what a rank holds; auto has room for its part of the longest document."""
    step = {"tokens_per_step": 2**20, "steps": 10, "lr": 1e-4}
    asked = question(parallel=parallel, data={"train": "d.jsonl", "max_tokens": 131072}, train=step | train)
    assert asked.layout is not None
    assert asked.layout.cp == cp
    assert replace(asked.job, layout=asked.layout).micro_batch_tokens == rank_tokens


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"train": "d.jsonl", "pack": False}}, "set pack: true"),
        ({"router": {"balance": 0.01, "balance_over": "sequence"}}, "needs whole documents"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_read(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        run(parallel={"cp": 2}, **sections)
