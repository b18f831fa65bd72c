"""A base in few bits on many ranks equals one process: ep divides experts, zero3 the packed bytes of each weight."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from fp8_made import save_fp8
from processes import free_ports, on_ranks
from steps import CPU
from test_parity import demand_equality
from torch.distributed.tensor import DTensor

from gatewright.model.attention import choose_kernel
from gatewright.model.experts import find_experts
from gatewright.model.load import load_model
from gatewright.model.quantized import QuantizedWeight
from gatewright.parallel.apply import divider
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.run import Run

RECOMPUTED = {"train__checkpointing": "full"}
FEW_TOKENS = {"train__tokens_per_step": 100}
"""One micro-batch a step: all ranks but one have none."""
PLACED = {"router__placement": "measured"}
TWO = {
    "nf4 ep2": ("qwen3_moe", "nf4", {}, {"ep": 2}),
    "nf4 ep2 recomputed": ("qwen3_moe", "nf4", RECOMPUTED, {"ep": 2}),
    "nf4 ep2 zero2": ("qwen2_moe", "nf4", {}, {"ep": 2, "dense": "zero2"}),
    "nf4 dense zero2": ("llama", "nf4", {}, {"dense": "zero2"}),
    "nf4 dense replicate": ("llama", "nf4", {}, {}),
    "fp8 ep2": ("qwen3_moe", "fp8", {}, {"ep": 2}),
    "fp8 ep2 zero2": ("qwen2_moe", "fp8", {}, {"ep": 2, "dense": "zero2"}),
    "fp8 dense zero2": ("llama", "fp8", {}, {"dense": "zero2"}),
    "fp8 files made dense, ep2": ("qwen3_moe", "from fp8", {}, {"ep": 2}),
    "nf4 dense zero3": ("llama", "nf4", {}, {"dense": "zero3"}),
    "nf4 dense zero3 tied head": ("llama-tied", "nf4", {}, {"dense": "zero3"}),
    "nf4 zero3 recomputed": ("qwen2_moe", "nf4", RECOMPUTED, {"dense": "zero3"}),
    "nf4 ep2 zero3": ("qwen3_moe", "nf4", {}, {"ep": 2, "dense": "zero3"}),
    "experts with biases, nf4 zero3": ("gpt_oss", "nf4", {}, {"dense": "zero3"}),
    "fp8 dense zero3": ("llama", "fp8", {}, {"dense": "zero3"}),
    "fp8 zero3": ("qwen3_moe", "fp8", {}, {"dense": "zero3"}),
    "fp8 files made dense, zero3": ("qwen3_moe", "from fp8", {}, {"dense": "zero3"}),
    "one rank idle, nf4 zero3": ("qwen3_moe", "nf4", FEW_TOKENS, {"dense": "zero3"}),
    "one rank idle, nf4 ep2": ("qwen3_moe", "nf4", FEW_TOKENS, {"ep": 2}),
}
FOUR = {
    "nf4 ep4": ("qwen3_moe", "nf4", {}, {"ep": 4}),
    "nf4 ep2 zero2": ("qwen3_moe", "nf4", {}, {"ep": 2, "dense": "zero2"}),
    "nf4 ep2 zero2 two copies": ("qwen3_moe", "nf4", {}, {"ep": 2, "dense": "zero2", "dp_replicate": 2}),
    "fp8 ep4": ("qwen3_moe", "fp8", {}, {"ep": 4}),
    "fp8 ep2 zero2": ("qwen3_moe", "fp8", {}, {"ep": 2, "dense": "zero2"}),
    "nf4 zero3": ("qwen3_moe", "nf4", {}, {"dense": "zero3"}),
    "nf4 zero3 two copies": ("qwen3_moe", "nf4", {}, {"dense": "zero3", "dp_replicate": 2}),
    "nf4 ep2 zero3": ("qwen3_moe", "nf4", {}, {"ep": 2, "dense": "zero3"}),
    "nf4 ep4 zero3 recomputed": ("qwen3_moe", "nf4", RECOMPUTED, {"ep": 4, "dense": "zero3"}),
    "experts with biases, nf4 ep2 zero3": ("gpt_oss", "nf4", {}, {"ep": 2, "dense": "zero3"}),
    "fp8 ep2 zero3": ("qwen3_moe", "fp8", {}, {"ep": 2, "dense": "zero3"}),
    "fp8 ep2, experts placed": ("qwen3_moe", "fp8", PLACED, {"ep": 2}),
    "fp8 ep2 zero3, experts placed": ("qwen3_moe", "fp8", PLACED, {"ep": 2, "dense": "zero3"}),
    "fp8 files made dense, ep2 zero3": ("qwen3_moe", "from fp8", {}, {"ep": 2, "dense": "zero3"}),
    "three ranks idle, nf4 ep2 zero3": ("qwen3_moe", "nf4", FEW_TOKENS, {"ep": 2, "dense": "zero3"}),
    "three ranks idle, fp8 ep4": ("qwen3_moe", "fp8", FEW_TOKENS, {"ep": 4}),
}


def make(
    folder: Path, name: str, kind: str, storage: str, changes: dict[str, object], layout: dict[str, object]
) -> Run:
    """A run on a base of that kind; `from fp8` is an FP8 checkpoint that is made dense at load."""
    plain = tiny.make_run(folder, kind)
    base = Path(plain.model.path)
    if "fp8" in storage and not (base := folder / f"fp8-{kind}").exists():
        save_fp8(Path(plain.model.path), base)
    values = {"train__micro_batch_tokens": 100, "train__lr": 1e-3, "train__weight_decay": 0.1, "train__clip_norm": 0.5}
    values |= {"model__path": str(base), "method__quantize": "none" if storage == "from fp8" else storage}
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    return tiny.make_run(folder, kind, run=name.replace(" ", "-").replace(",", ""), **values | changes | parallel)


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_many_ranks_equal_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    demand_equality({name: make(tmp_path, name, *case) for name, case in cases.items()}, tmp_path, size=size)


def load(run: Run, ranks: object = None) -> torch.nn.Module:
    kernel = choose_kernel(CPU, torch.float32)
    divide = divider(ranks) if ranks is not None else None
    return load_model(run.model, device=CPU, kernel=kernel, quantize=run.method.quantize, divide=divide)


def parts_of(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The packed tensors of each weight in few bits, and the others as they are; of a divided one, this rank's part."""
    parts = {}
    for name, weight in model.named_parameters():
        if isinstance(weight, QuantizedWeight):
            parts[name] = dict(weight.parts)
        else:
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            parts[name] = {"plain": own.detach().clone()}
    return parts


def parts_on_rank(
    place: Place, runs: dict[str, Run], ports: list[int]
) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    found = {}
    for (name, run), port in zip(runs.items(), ports, strict=True):
        layout = layout_of(run.parallel, ranks=place.size)
        with join_ranks(replace(place, port=port), layout, device=CPU, timeout_s=60) as ranks:
            found[name] = parts_of(load(run, ranks))
    return found


def test_a_rank_packs_its_own_experts_to_the_bytes_of_one_process(tmp_path: Path) -> None:
    runs = {s: make(tmp_path, s, "qwen3_moe", s, {}, {"ep": 2}) for s in ("nf4", "fp8", "from fp8")}
    ranks = on_ranks(2, tmp_path / "ranks", parts_on_rank, runs, free_ports(len(runs)))
    for storage, run in runs.items():
        model = load(run)
        stacks = {id(p) for module in find_experts(model).values() for p in module.parameters()}
        stacked = {name for name, p in model.named_parameters() if id(p) in stacks}
        assert len(stacked) == 4
        for name, parts in parts_of(model).items():
            for part, wanted in parts.items():
                got = [rank[storage][name][part].view(torch.uint8) for rank in ranks]
                wanted = wanted.view(torch.uint8)
                if name in stacked:
                    assert len(got[0]) == len(got[1]) == len(wanted) // 2
                    assert torch.equal(torch.cat(got), wanted), f"{storage}: {part} of {name}"
                else:
                    assert all(torch.equal(one, wanted) for one in got), f"{storage}: {part} of {name}"
