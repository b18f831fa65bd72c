"""What each layout really holds on a rank: the planner's bytes, and what the layout's name promises."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from processes import free_ports, on_ranks
from test_parity import take_all

from gatewright.planner.memory_states import shares, states
from gatewright.planner.plan_run import ask_run, layout_of
from gatewright.planner.policy import find_policy
from gatewright.spec.run import Hardware, Run

RANKS = 4
EXPERTS_BYTES = 2 * 8 * 3 * 32 * 24 * 2
"""Of the tiny model: 2 layers of 8 experts of three matrices of 32 by 24, in bfloat16."""
LAYOUTS = {
    "replicate": {"dense": "replicate"},
    "ep4": {"ep": 4},
    "zero2": {"dense": "zero2"},
    "ep2-zero2": {"ep": 2, "dense": "zero2"},
    "zero3": {"dense": "zero3"},
    "ep2-zero3": {"ep": 2, "dense": "zero3"},
    "zero3-two-copies": {"dense": "zero3", "dp_replicate": 2},
}


def make(folder: Path, name: str, method: str, layout: dict[str, object], **changes: object) -> Run:
    changes |= {"method__adapter": None} if method == "full" else {}
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    run = tiny.make_run(
        folder, "qwen3_moe", run=f"{method}-{name}", model__dtype="bfloat16", train__micro_batch_tokens=100,
        **changes, **parallel,
    )  # fmt: skip
    return run.model_copy(update={"hardware": Hardware(gpu="h200", per_node=RANKS, nodes=1)})


def planned(run: Run) -> dict[str, float]:
    """The planner's bytes of this run's states on one rank."""
    job = replace(ask_run(run, gpus=RANKS).job, layout=layout_of(run, RANKS))
    policy = find_policy("gatewright")
    found = states(job, policy, shares(job, policy, 0))
    return {
        "weights": found.trained_weights + found.adapters,
        "frozen": found.frozen_weights,
        "gradients": found.grads,
        "optimizer": found.optimizer,
    }


@pytest.mark.parametrize("method", ["lora", "full"])
def test_bytes_of_a_rank_are_those_of_the_plan(tmp_path: Path, method: str) -> None:
    """Within 3 %."""
    runs = {name: make(tmp_path, name, method, layout) for name, layout in LAYOUTS.items()}
    ranks = on_ranks(RANKS, tmp_path / "ranks", take_all, runs, free_ports(len(runs)), 1)
    faults = []
    for name, run in runs.items():
        wanted = planned(run)
        for what, figure in wanted.items():
            measured = max(part[name].bytes[what] for part in ranks)
            if not abs(measured - figure) <= 0.03 * figure + 64:
                faults.append(f"{name}: {what} {measured:,} bytes, planned {figure:,.0f}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("layout", ["ep4", "ep2-zero2"])
def test_bytes_of_the_rank_with_most_adapted_experts_are_those_of_the_plan(tmp_path: Path, layout: str) -> None:
    layers = [{"layer": 1, "experts": [6, 7, 1]}, {"layer": 2, "experts": [5, 7]}]
    run = make(tmp_path, layout, "lora", LAYOUTS[layout], method__adapter__experts={"layers": layers})
    ranks = on_ranks(RANKS, tmp_path / "ranks", take_all, {layout: run}, free_ports(1), 1)
    assert len({part[layout].bytes["weights"] for part in ranks}) > 1
    for what, figure in planned(run).items():
        assert max(part[layout].bytes[what] for part in ranks) == pytest.approx(figure, rel=0.03), what


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_names_of_the_layouts_are_true(tmp_path: Path, method: str) -> None:
    """Of what trains, zero2 divides gradients and optimizer state by the ranks, zero3 the weights too."""
    runs = {name: make(tmp_path, name, method, LAYOUTS[name]) for name in ("replicate", "zero2", "zero3", "ep4")}
    ranks = on_ranks(RANKS, tmp_path / "ranks", take_all, runs, free_ports(len(runs)), 1)
    held = {name: {what: max(p[name].bytes[what] for p in ranks) for what in ranks[0][name].bytes} for name in runs}
    whole = held["replicate"]
    for name, divided in {"zero2": ("gradients", "optimizer"), "zero3": ("weights", "gradients", "optimizer")}.items():
        for what in ("weights", "gradients", "optimizer"):
            share = held[name][what] / whole[what]
            assert share == pytest.approx(1 / RANKS if what in divided else 1.0, rel=0.03), (
                f"{name}: {what} {share:.3f}"
            )
    base = "frozen" if method == "lora" else "weights"
    assert whole[base] - held["ep4"][base] == EXPERTS_BYTES * (RANKS - 1) // RANKS
