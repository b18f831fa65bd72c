"""N ranks equal one: loss, gradients, clipped norm, weights after three steps, and every count, in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from processes import free_ports, on_ranks
from steps import CPU, Taken, alone, put_together, take_steps

from gatewright.model.load import read_config
from gatewright.parallel.layout import layout_of
from gatewright.parallel.parity import Parity, compare
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.run import Run

RELATIVE = 1e-5

FULL = {"method__adapter": None}
ROUTER = {
    "router__train": True, "router__lr_scale": 1.0, "router__balance": 0.05, "router__z": 1e-3, **FULL,
}  # fmt: skip
RECOMPUTED = {"train__checkpointing": "full"}
BESIDE = {"method__adapter__full": ["router", "norm", "head"]}
EMBEDDING_BESIDE = {"method__adapter__full": ["embedding", "norm"]}
FEW_TOKENS = {"train__tokens_per_step": 100}
"""One micro-batch a step: all ranks but one have none."""

TWO = {
    "dense lora replicate": ("llama", {}, {}),
    "dense full replicate": ("llama-tied", FULL, {}),
    "dense lora zero2": ("llama", {}, {"dense": "zero2"}),
    "dense full zero2": ("llama-tied", FULL, {"dense": "zero2"}),
    "dense lora zero3": ("llama", {}, {"dense": "zero3"}),
    "dense full zero3": ("llama", FULL, {"dense": "zero3"}),
    "dense full zero3 tied head": ("llama-tied", FULL, {"dense": "zero3"}),
    "moe lora replicate": ("qwen3_moe", {}, {}),
    "moe lora zero3": ("qwen3_moe", {}, {"dense": "zero3"}),
    "moe lora ep2": ("qwen3_moe", {}, {"ep": 2}),
    "moe lora ep2 recomputed": ("qwen3_moe", RECOMPUTED, {"ep": 2}),
    "moe full ep2": ("mixtral", FULL, {"ep": 2}),
    "moe full zero3 ep2": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero3"}),
    "moe full zero3 ep2 recomputed": ("qwen3_moe", RECOMPUTED | FULL, {"ep": 2, "dense": "zero3"}),
    "shared experts full zero3": ("qwen2_moe", FULL, {"dense": "zero3"}),
    "llama4 lora ep2": ("llama4", {}, {"ep": 2}),
    "llama4 full zero3 ep2": ("llama4", FULL, {"ep": 2, "dense": "zero3"}),
    "llama4 lora zero3 recomputed": ("llama4", RECOMPUTED, {"dense": "zero3"}),
    "full beside lora zero3": ("qwen3_moe", BESIDE, {"dense": "zero3"}),
    "embedding beside lora zero3": ("llama", EMBEDDING_BESIDE, {"dense": "zero3"}),
    "full beside lora zero3 ep2": ("qwen3_moe", BESIDE, {"ep": 2, "dense": "zero3"}),
    "router losses, ep2": ("qwen3_moe", ROUTER, {"ep": 2}),
    "router losses, zero2": ("qwen3_moe", ROUTER, {"dense": "zero2"}),
    "capacity, ep2": ("qwen3_moe", {"router__capacity": 1.0}, {"ep": 2}),
    "one rank idle, ep2": ("qwen3_moe", FEW_TOKENS, {"ep": 2}),
    "one rank idle, zero3": ("qwen3_moe", FEW_TOKENS, {"dense": "zero3"}),
    "one rank idle, router losses": ("qwen3_moe", ROUTER | FEW_TOKENS, {}),
    "one document a micro-batch": ("qwen3_moe", {"data__pack": False}, {"ep": 2, "dense": "zero2"}),
}  # fmt: skip
FOUR = {
    "moe lora ep4": ("qwen3_moe", {}, {"ep": 4}),
    "moe lora ep2 of 4": ("qwen3_moe", {}, {"ep": 2}),
    "moe lora ep2 zero2": ("qwen3_moe", {}, {"ep": 2, "dense": "zero2"}),
    "moe lora zero3": ("qwen3_moe", {}, {"dense": "zero3"}),
    "moe lora zero3 two copies": ("qwen3_moe", {}, {"dense": "zero3", "dp_replicate": 2}),
    "moe lora ep2 zero3": ("qwen3_moe", {}, {"ep": 2, "dense": "zero3"}),
    "moe lora ep2 zero3 two copies": ("qwen3_moe", {}, {"ep": 2, "dense": "zero3", "dp_replicate": 2}),
    "moe lora ep4 zero3 recomputed": ("qwen3_moe", RECOMPUTED, {"ep": 4, "dense": "zero3"}),
    "moe full ep2 zero2 two copies": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero2", "dp_replicate": 2}),
    "moe full ep2 zero3": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero3"}),
    "moe full ep2 zero3 two copies": ("qwen3_moe", FULL, {"ep": 2, "dense": "zero3", "dp_replicate": 2}),
    "dense full zero3 two copies": ("llama-tied", FULL, {"dense": "zero3", "dp_replicate": 2}),
    "three ranks idle, ep4": ("qwen3_moe", FEW_TOKENS, {"ep": 4}),
    "three ranks idle, full zero3 ep2": ("qwen3_moe", FULL | FEW_TOKENS, {"ep": 2, "dense": "zero3"}),
    "three ranks idle, full zero2": ("qwen3_moe", FULL | FEW_TOKENS, {"dense": "zero2"}),
}


def make(folder: Path, name: str, kind: str, changes: dict[str, object], parallel: dict[str, object]) -> Run:
    values = {"train__micro_batch_tokens": 100, "train__lr": 1e-3, "train__weight_decay": 0.1, "train__clip_norm": 0.5}
    layout = {f"parallel__{key}": value for key, value in parallel.items()}
    return tiny.make_run(folder, kind, run=name.replace(" ", "-").replace(",", ""), **values | changes | layout)


def take_all(place: Place, runs: dict[str, Run], ports: list[int], steps: int) -> dict[str, Taken]:
    met = zip(runs.items(), ports, strict=True)
    return {name: take_steps(replace(place, port=port), run, steps=steps) for (name, run), port in met}


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_many_ranks_equal_one(tmp_path: Path, size: int, cases: dict[str, tuple]) -> None:
    demand_equality({name: make(tmp_path, name, *case) for name, case in cases.items()}, tmp_path, size=size)


def demand_equality(
    runs: dict[str, Run], folder: Path, *, size: int, steps: int = 3, weights: float | None = RELATIVE
) -> None:
    """The runs' first steps on so many ranks are those of one process; `weights`: as below."""
    one = {name: alone(run, steps=steps) for name, run in runs.items()}
    many = on_ranks(size, folder / "ranks", take_all, runs, free_ports(len(runs)), steps, patience_s=300)
    faults = []
    for name in runs:
        found = differences(one[name], [part[name] for part in many], weights=weights)
        faults += [f"{name}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


def differences(one: Taken, many: list[Taken], *, weights: float | None = RELATIVE) -> list[str]:
    """What differs, in words; tensors that ranks replicate must be equal to the bit (put_together).

    `weights`: their largest relative error. Where no gradient is far from zero, AdamW's division makes much of its
    rounding: None leaves them out.
    """
    faults = []
    for rank, taken in enumerate(many):
        for step, (want, got) in enumerate(zip(one.numbers, taken.numbers, strict=True), start=1):
            for name in ("tokens", "target_tokens", "expert_tokens", "dropped"):
                if want[name] != got[name]:
                    faults.append(f"rank {rank}, step {step}: {name} {got[name]} instead of {want[name]}")
            for name in ("loss", "grad_norm", "balance_loss", "z_loss"):
                if want[name] is not None and not abs(got[name] - want[name]) <= RELATIVE * abs(want[name]):
                    faults.append(f"rank {rank}, step {step}: {name} {got[name]} instead of {want[name]}")
    compared = [("gradient", [t.gradients for t in many], RELATIVE), ("weight", [t.weights for t in many], weights)]
    for what, parts, largest in compared if weights else compared[:1]:
        wanted = put_together([one.gradients if what == "gradient" else one.weights])
        whole = put_together(parts)
        if set(wanted) != set(whole):
            faults.append(f"{what}s of other names: {sorted(set(wanted) ^ set(whole))[:3]}")
        for name in set(wanted) & set(whole):
            error = (whole[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-12)
            if not error <= largest:
                faults.append(f"{what} of {name}: relative error {error:.1e}")
    return faults


def test_the_cases_hold_what_they_say(tmp_path: Path) -> None:
    """Some expert gets no token, some assignment is dropped, some step has fewer micro-batches than ranks."""
    few = alone(make(tmp_path, "few", *FOUR["three ranks idle, ep4"]))
    assert any(0 in row for number in few.numbers for row in number["expert_tokens"])
    dropping = alone(make(tmp_path, "dropping", *TWO["capacity, ep2"]))
    assert all(sum(number["dropped"]) > 0 for number in dropping.numbers)
    losses = alone(make(tmp_path, "losses", *TWO["router losses, ep2"]))
    assert all(number["balance_loss"] > 0 and number["z_loss"] > 0 for number in losses.numbers)


def test_replicated_adapters_are_the_same_on_every_rank_after_some_steps(tmp_path: Path) -> None:
    layouts = {"replicate": {}, "zero2": {"dense": "zero2"}, "ep2": {"ep": 2, "dense": "zero2"}}
    runs = {name: make(tmp_path, name, "qwen3_moe", {}, layout) for name, layout in layouts.items()}
    ranks = on_ranks(4, tmp_path / "ranks", take_all, runs, free_ports(len(runs)), 5)
    for name in layouts:
        for rank in range(4):
            first = rank % 2 if name == "ep2" else 0  # experts of ranks 0 and 2, and of 1 and 3, are the same
            for weight, tensor in ranks[rank][name].held.items():
                like = ranks[first if ".experts." in weight else 0][name].held[weight]
                assert torch.equal(tensor, like), f"{name}: {weight} on rank {rank}"


def self_test(place: Place, run: Run, ports: list[int]) -> list[Parity]:
    found = []
    cases = [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float32, "nf4"), (torch.float32, "fp8")]
    for port, (dtype, quantize) in zip(ports, cases, strict=True):
        layout = layout_of(run.parallel, ranks=place.size)
        with join_ranks(replace(place, port=port), layout, device=CPU, timeout_s=60) as ranks:
            found.append(compare(read_config(Path(run.model.path)), ranks, dtype=dtype, quantize=quantize))
    return found


def test_the_self_test_holds_on_this_machine(tmp_path: Path) -> None:
    run = make(tmp_path, "self test", "qwen3_moe", {}, {"ep": 2})
    for ranks in on_ranks(4, tmp_path / "ranks", self_test, run, free_ports(4)):
        for found in ranks:
            assert found.holds and found.tolerance > 0 and found.output >= 0, found
