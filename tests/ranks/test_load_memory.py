"""Host memory of a load: what a rank takes while it reads a model, beside what it then holds of it.

Counted is memory of the process's own, sampled every millisecond. Pages of the files, which are mapped, belong to the
system: all ranks of a node share them, and it takes them back when it needs them.
"""

import ctypes
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
from processes import on_ranks
from torch.distributed.tensor import DTensor

from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.parallel.apply import divider, settle
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.run import Model, Parallel

CPU = torch.device("cpu")
RANKS = 2
MIB = 2**20
SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "num_hidden_layers": 4, "mlp_only_layers": [], "num_experts": 32, "moe_intermediate_size": 512,
}  # fmt: skip
LARGEST_BYTES = 32 * 1024 * 512 * 4
"""The up-projections of a layer's experts, in float32."""
SLACK_BYTES = 24 * MIB
"""What Python, the loader's threads and the allocator take, whatever the model."""
LAYOUTS = {
    "replicate": Parallel(),
    "zero2": Parallel(dense="zero2"),
    "zero3": Parallel(dense="zero3"),
    "ep": Parallel(ep=RANKS),
    "ep and zero3": Parallel(ep=RANKS, dense="zero3"),
}


@dataclass(frozen=True, slots=True)
class Load:
    held_bytes: int
    peak_bytes: int
    """Above what the process had before."""


def own_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def load(place: Place, folder: Path, parallel: Parallel) -> Load:
    with join_ranks(place, layout_of(parallel, ranks=place.size), device=CPU, timeout_s=60) as ranks:
        ranks.wait()
        ctypes.CDLL(None).malloc_trim(0)  # room that is left over from before would hide what is taken
        before, peak, done = own_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                peak[0] = max(peak[0], own_bytes())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        kernel = choose_kernel(CPU, torch.float32)
        asked = Model(path=str(folder), dtype="float32")
        model = load_model(asked, device=CPU, kernel=kernel, divide=divider(ranks))
        settle(model, ranks)
        done.set()
        watcher.join()
        held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        return Load(sum(p.nbytes for p in held), peak[0] - before)


@pytest.mark.slow
def test_a_rank_takes_what_it_holds_and_no_more_than_one_tensor_beside(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "model", **SIZES)
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert whole > 400 * MIB
    for name, parallel in LAYOUTS.items():
        for rank in on_ranks(RANKS, tmp_path / name, load, folder, parallel):
            print(f"{name}: holds {rank.held_bytes / MIB:.0f} MiB, peak {rank.peak_bytes / MIB:.0f} MiB")
            assert rank.peak_bytes <= rank.held_bytes + LARGEST_BYTES + SLACK_BYTES, name
            share = rank.held_bytes / whole
            assert share < 0.6 if parallel.dense == "zero3" or parallel.ep > 1 else share > 0.95, name
            # A measure that saw nothing would pass everything. What is not copied stays mapped, and is not counted.
            assert rank.peak_bytes > 0.5 * rank.held_bytes, name
