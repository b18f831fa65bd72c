"""Adapters under zero3: of every kind divided, gathered with their block, and what they would be in one process."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import free_ports, on_ranks
from steps import CPU
from test_parity import demand_equality, make
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from whole_runs import finish

from gatewright.model.coverage import Coverage
from gatewright.parallel.join_fsdp import join_fsdp
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.errors import ModelError
from gatewright.spec.run import Run
from gatewright.train.setup import set_up
from gatewright.train.step import train_step

TARGETS, FULL = "method__adapter__targets", "method__adapter__full"
ZERO3 = {"dense": "zero3"}
EVERYTHING = {TARGETS: ["embedding", "attention", "mlp", "head"]}
SOME_EXPERTS = {"method__adapter__experts": {"most_routed": 0.4}}
"""Three of eight: chosen by a forward pass before there are adapters, and more than two ranks divide evenly."""
LOW = {"method__adapter__rank": 1}
"""Factors of one row, and of one column."""
CASES = {
    "everything": ("llama", EVERYTHING, ZERO3),
    "some experts": ("qwen3_moe", SOME_EXPERTS, ZERO3),
    "rank 1": ("qwen3_moe", LOW, ZERO3),
    "rank 1, recomputed": ("llama", LOW | {"train__checkpointing": "full"}, ZERO3),
    "rank 3, nf4": ("qwen3_moe", {"method__adapter__rank": 3, "method__quantize": "nf4"}, ZERO3),
}
ROUTER = {TARGETS: ["attention", "experts", "router"]}
"""A router's update starts so small that three steps of AdamW make much of its rounding: the first is compared."""


def test_of_every_kind_they_equal_one_process(tmp_path: Path) -> None:
    demand_equality({name: make(tmp_path, name, *case) for name, case in CASES.items()}, tmp_path, size=2)


@pytest.mark.parametrize(("size", "layout"), [(2, ZERO3), (4, {"ep": 2, "dense": "zero3"})], ids=["2 ranks", "4 ranks"])
def test_a_router_takes_one_too(tmp_path: Path, size: int, layout: dict[str, object]) -> None:
    run = make(tmp_path, "router", "qwen3_moe", ROUTER, layout)
    demand_equality({"router": run}, tmp_path, size=size, steps=1, weights=None)


@pytest.mark.parametrize(("size", "layout"), [(2, ZERO3), (4, {"ep": 2, "dense": "zero3"})], ids=["2 ranks", "4 ranks"])
def test_a_saved_one_is_taken_up(tmp_path: Path, size: int, layout: dict[str, object]) -> None:
    """Saved by ranks that divide it, and started from by ranks that do, and by one process."""
    beside = {FULL: ["norm", "head"]}
    first = make(tmp_path, "first", "qwen3_moe", beside | {"train__steps": 2}, layout)
    finish(first, size)
    start = beside | {"method__adapter__start": str(first.folder / "adapter")}
    demand_equality({"second": make(tmp_path, "second", "qwen3_moe", start, layout)}, tmp_path, size=size)


class Collectives(TorchDispatchMode):
    """Counts the collectives inside the block, by torch's name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


Looked = tuple[set[str], list[Coverage], Counter[str]]


def look(place: Place, runs: dict[str, Run], ports: list[int]) -> dict[str, Looked]:
    """Trained weights that are whole on this rank, what is said to train, and the collectives of a step."""
    torch.set_num_threads(1)
    found = {}
    for (name, run), port in zip(runs.items(), ports, strict=True):
        layout = layout_of(run.parallel, ranks=place.size)
        with join_ranks(replace(place, port=port), layout, device=CPU, timeout_s=60) as ranks:
            trainer = set_up(run, log=lambda event: None, ranks=ranks)
            with Collectives() as counter:
                train_step(
                    trainer.model, trainer.head, trainer.optimizer, trainer.gradients, trainer.loader.step(0)[:1],
                    lr=1e-3, clip_norm=1.0, loss_chunk_tokens=256,
                )  # fmt: skip
            whole = {n for n, weight in trainer.parameters.items() if not isinstance(weight, DTensor)}
            found[name] = (whole, trainer.coverage, counter.counts)
    return found


def test_none_is_whole_and_one_gather_brings_a_block(tmp_path: Path) -> None:
    """Twelve adapted weights in a block cost no more collectives than two, and no reduction more than one a block."""
    few, many = {TARGETS: ["*.q_proj"]}, {TARGETS: ["attention", "experts", "mlp", "router"], FULL: ["norm"]}
    runs = {
        "few": make(tmp_path, "few", "qwen3_moe", few, ZERO3),
        "many": make(tmp_path, "many", "qwen3_moe", many, ZERO3),
        "everything": make(tmp_path, "everything", "llama", EVERYTHING | {FULL: ["norm"]}, ZERO3),
    }
    alone = {name: run.model_copy(update={"parallel": "auto"}) for name, run in runs.items()}
    covered_alone = {name: set_up(run, log=lambda event: None).coverage for name, run in alone.items()}
    for rank in on_ranks(2, tmp_path / "ranks", look, runs, free_ports(len(runs))):
        for name, (whole, covered, _) in rank.items():
            assert not whole, name
            assert covered == covered_alone[name], name
        counts = {name: counted for name, (_, _, counted) in rank.items()}
        layers = tiny.SIZES["num_hidden_layers"]
        # Each block, and embedding and final norm together, for the forward and for the backward pass.
        assert counts["few"]["_allgather_base_"] == counts["many"]["_allgather_base_"] == 2 * (layers + 1)
        assert counts["few"]["_reduce_scatter_base_"] == layers
        assert counts["many"]["_reduce_scatter_base_"] == layers + 1  # the final norm trains


def test_a_torch_whose_inside_is_another_is_refused() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"zero3: torch .* use dense: zero2, or torch 2\.13"):
        join_fsdp(module, [(module, "weight")], mesh=None, policy=MixedPrecisionPolicy())  # type: ignore[arg-type]
