"""A rank of many, rehearsed alone: what it holds is what real ranks hold, and its peaks are theirs, to the byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from processes import free_ports, on_ranks
from test_parity import BESIDE, FULL, RECOMPUTED, make, take_all
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gatewright.model import attention
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import Ranks, join_ranks
from gatewright.probe.fake_ranks import first_of
from gatewright.probe.rehearsal import build, packed_batch, rehearse, take_steps
from gatewright.probe.rehearsal_observe import Observed, observe_depth, observe_model
from gatewright.spec.run import Run

CPU = attention.Kernel("sdpa per document", "the test compares with this machine", attention.attend_each_document)
NF4 = {"method__quantize": "nf4"}
CASES = {
    "dense lora replicate": ("llama", {}, {}),
    "dense lora zero2": ("llama", {}, {"dense": "zero2"}),
    "dense full zero2": ("llama", FULL, {"dense": "zero2"}),
    "dense lora zero3": ("llama", RECOMPUTED, {"dense": "zero3"}),
    "dense full zero3": ("llama", FULL | RECOMPUTED, {"dense": "zero3"}),
    "dense full zero3 tied head": ("llama-tied", FULL, {"dense": "zero3"}),
    "moe lora zero3": ("qwen3_moe", BESIDE, {"dense": "zero3"}),
    "moe lora ep2": ("qwen3_moe", {}, {"ep": 2}),
    "moe full ep2": ("mixtral", FULL, {"ep": 2}),
    "moe lora ep2 zero2": ("qwen3_moe", {}, {"ep": 2, "dense": "zero2"}),
    "moe full zero3 ep2": ("qwen3_moe", FULL | RECOMPUTED, {"ep": 2, "dense": "zero3"}),
    "dense nf4 zero3": ("llama", NF4 | RECOMPUTED, {"dense": "zero3"}),
    "moe nf4 ep2": ("qwen3_moe", NF4, {"ep": 2}),
    "moe nf4 zero3": ("qwen3_moe", NF4, {"dense": "zero3"}),
    "moe nf4 ep2 zero3": ("qwen3_moe", NF4, {"ep": 2, "dense": "zero3"}),
}


def test_a_rank_holds_the_bytes_that_are_rehearsed(tmp_path: Path) -> None:
    """Weights, gradients and optimizer state of two processes after a step of the trainer."""
    runs = {name: make(tmp_path, name, *case) for name, case in CASES.items()}
    taken = on_ranks(2, tmp_path / "ranks", take_all, runs, free_ports(len(runs)), 1, patience_s=200)[0]
    for name, run in runs.items():
        layout = layout_of(run.parallel, ranks=2)
        held = rehearse(run, lengths=[40, 60], layout=layout, full_depth=True).held
        rehearsed = {key: getattr(held, key) for key in taken[name].bytes}
        assert rehearsed == taken[name].bytes, name


DENSE = [name for name, (kind, _, _) in CASES.items() if kind.startswith("llama") and "nf4" not in name]


def test_the_peaks_of_real_ranks_are_rehearsed_to_the_byte(tmp_path: Path) -> None:
    """The same two steps under the same counter; dense models, whose sizes no routing decides."""
    runs = {name: make(tmp_path, name, *CASES[name]) for name in DENSE}
    kinds = {name: CASES[name][0] for name in DENSE}
    many = on_ranks(2, tmp_path / "ranks", observe_all, runs, kinds, free_ports(len(runs)), patience_s=200)[0]
    for name, run in runs.items():
        with first_of(layout_of(run.parallel, ranks=2)) as ranks:
            make_model, steps = work(kinds[name], run, ranks)
            fake = observe_depth(make_model, steps, 3)
        assert differences(fake, many[name]) == [], name
        assert fake == many[name], name
        assert len(fake.peaks) >= 3 * 2 + 3


def differences(fake: Observed, real: Observed) -> list[str]:
    """Where peaks differ, for reading: segment, bytes and operator of both."""
    return [
        f"{segment}: {peak.bytes} {peak.operator} | {real.peaks[segment].bytes} {real.peaks[segment].operator}"
        for segment, peak in fake.peaks.items()
        if peak != real.peaks[segment]
    ]


def observe_all(place: Place, runs: dict[str, Run], kinds: dict[str, str], ports: list[int]) -> dict[str, Observed]:
    """What each run's steps allocate on this rank, on real tensors."""
    torch.set_num_threads(1)
    found = {}
    for (name, run), port in zip(runs.items(), ports, strict=True):
        met = Place(rank=place.rank, size=place.size, local_rank=place.local_rank, address=place.address, port=port)
        with join_ranks(met, layout_of(run.parallel, ranks=2), device=torch.device("cpu"), timeout_s=60) as ranks:
            make_model, steps = work(kinds[name], run, ranks)
            with GivenCopies():
                found[name] = observe_model(make_model(), steps)
    return found


class GivenCopies(TorchDispatchMode):
    """Hands collectives copies of their tensors, below the counter, which so does not see them.

    gloo's threads let go of what they were given some time after the collective is over: up to 4 ms, one time in ten.
    """

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        result = func(*tree_map_only(Tensor, lambda tensor: copies[id(tensor)], args), **(kwargs or {}))
        Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        for tensor in tensors:
            tensor.copy_(copies[id(tensor)])
        originals = {id(copies[id(tensor)]): tensor for tensor in tensors}
        return tree_map_only(Tensor, lambda tensor: originals.get(id(tensor), tensor), result)


def work(kind: str, run: Run, ranks: Ranks) -> tuple[Callable, Callable]:
    """The model of a run, and its steps."""
    batches = [packed_batch([50, 70, 33])]
    return (
        lambda: build(tiny.config(kind), run, CPU, ranks),
        lambda model, live: take_steps(model, run, batches, live, ranks),
    )
