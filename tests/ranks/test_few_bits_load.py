"""What a rank of a divided base in few bits holds and needs while it loads; and runs that move between layouts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from fp8_made import save_fp8
from peft import PeftModel
from processes import free_ports, on_ranks
from steps import CPU
from test_load_streaming import MB, big_model, shards_to_fp8
from test_plan_against_quantized import run_of, save_larger
from test_resharding import assert_like, finish, go_back_to, make, result, tokens_of_steps

from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.model.quantized import quantized_names, weight_bytes
from gatewright.parallel.apply import divider
from gatewright.parallel.layout import Layout
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.planner.memory import estimate_memory
from gatewright.planner.plan_run import ask_run, layout_of
from gatewright.spec import run as spec

CHILD = """
import json, sys
import torch
from gatewright.model.attention import choose_kernel
from gatewright.model.four_bit import bitsandbytes
from gatewright.model.load import load_model
from gatewright.model.quantized import weight_bytes
from gatewright.parallel.apply import divider
from gatewright.parallel.layout import Layout
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.run import Model

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

small, big, storage, ep, dense, rank, port = sys.argv[1:]
torch.set_num_threads(1)
bitsandbytes()
cpu = torch.device("cpu")
kernel = choose_kernel(cpu, torch.bfloat16)
place = Place(rank=int(rank), size=2, local_rank=int(rank), address="localhost", port=int(port))
with join_ranks(place, Layout(ranks=2, ep=int(ep), dense=dense), device=cpu, timeout_s=60) as ranks:
    divide = divider(ranks)
    # Once on a small model, so that code which is imported on first use is not counted.
    load_model(Model(path=small), device=cpu, kernel=kernel, quantize=storage, divide=divide)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    model = load_model(Model(path=big), device=cpu, kernel=kernel, quantize=storage, divide=divide)
    print(json.dumps({"peak": status("VmHWM") - before, "held": weight_bytes(model)}))
"""


@pytest.mark.parametrize(("ep", "dense"), [(2, "replicate"), (1, "zero3"), (2, "zero3")])
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_the_peak_of_a_rank_is_its_packed_part_and_one_slice_of_a_stack(
    storage: str, ep: int, dense: str, tmp_path: Path
) -> None:
    whole = big_model(tmp_path / "big")
    small, big = tiny.save_model("qwen3_moe", tmp_path / "small"), tmp_path / "big"
    if storage == "fp8":
        small, big = save_fp8(small, tmp_path / "small-fp8"), shards_to_fp8(big)
    [port] = free_ports(1)
    command = [sys.executable, "-c", CHILD, str(small), str(big), storage, str(ep), dense]
    children = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for rank in range(2)
    ]
    slice_bytes = 32 * 2 * 512 * 512 * 4  # this rank's gate_up_proj of a layer in float32, as it is packed
    for rank, child in enumerate(children):
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        measured = json.loads(out.splitlines()[-1])
        peak, held = measured["peak"], measured["held"]
        sizes = f"{whole / MB:.0f} MB, held {held / MB:.1f} MB, peak {peak / MB:.1f} MB"
        print(f"{storage}, ep {ep}, {dense}, rank {rank}: {sizes}")
        assert held < {"nf4": 0.15, "fp8": 0.27}[storage] * whole
        assert held < peak < held + slice_bytes


def held_on_rank(place: Place, folder: Path, storage: str, layout: Layout) -> int:
    with join_ranks(place, layout, device=CPU, timeout_s=60) as ranks:
        kernel = choose_kernel(CPU, torch.bfloat16)
        model = load_model(
            spec.Model(path=str(folder)), device=CPU, kernel=kernel, quantize=storage, divide=divider(ranks)
        )
        assert quantized_names(model)
        return weight_bytes(model)


@pytest.mark.parametrize(("ep", "dense"), [(2, "replicate"), (1, "zero3"), (2, "zero3")])
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_each_rank_takes_the_planned_bytes(storage: str, ep: int, dense: str, tmp_path: Path) -> None:
    folder = save_larger("qwen3_moe", tmp_path / "base")
    if storage == "fp8":
        folder = save_fp8(folder, tmp_path / "fp8", block=(128, 128))
    run = run_of(folder, storage)
    hardware = run.hardware.model_copy(update={"per_node": 2})
    run = run.model_copy(update={"hardware": hardware, "parallel": spec.Parallel(ep=ep, dense=dense)})
    job = replace(ask_run(run).job, layout=layout_of(run, 2))
    [frozen] = [p for p in estimate_memory(job).phases[0].parts if p.name == "frozen weights"]
    alone = weight_bytes(load_model(run.model, device=CPU, kernel=choose_kernel(CPU, torch.bfloat16), quantize=storage))
    for held in on_ranks(2, tmp_path / "ranks", held_on_rank, folder, storage, Layout(ranks=2, ep=ep, dense=dense)):
        print(f"{storage}, ep {ep}, {dense}: planned {frozen.bytes:.0f}, held {held}, one process {alone}")
        assert frozen.bytes == pytest.approx(held, rel=0.01)
        assert held < 0.9 * alone


def test_a_run_on_packed_experts_moves_between_layouts(tmp_path: Path) -> None:
    """Two steps each on 2 ranks, in one process, on 4 and on 2; beside it, the run in one process alone."""
    straight = make(tmp_path, "straight", {}, method__quantize="nf4")
    finish(straight, 1)
    chain = [(2, {"ep": 2, "dense": "zero2"}), (1, {}), (4, {"ep": 2, "dense": "zero3"}), (2, {"dense": "zero3"})]
    for number, (size, layout) in enumerate(chain):
        run = make(tmp_path, "moved", layout, method__quantize="nf4")
        finish(run, size)
        if number < len(chain) - 1:
            go_back_to(run, 2 * (number + 1))
    assert [event["resumed_step"] for event in tiny.events(run, "start")] == [None, 2, 4, 6]
    assert tokens_of_steps(run) == tokens_of_steps(straight)
    assert_like(result(straight), result(run))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        plain = tiny.load_plain(Path(run.model.path))(tokens).logits
        by_peft = [
            PeftModel.from_pretrained(tiny.load_plain(Path(run.model.path)), str(r.folder / "adapter"))(tokens).logits
            for r in (straight, run)
        ]
    assert not torch.allclose(by_peft[0], plain, atol=1e-3)
    torch.testing.assert_close(by_peft[1], by_peft[0], rtol=0, atol=1e-3)
