"""What a run is told as it starts: the layout that `parallel: auto` becomes, its device's row, and its yardstick."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from test_plan_run import run as make_run

from gatewright.packing.flops import ModelFlops, Yardstick
from gatewright.planner.catalogue import find_device, find_gpu, find_shape, gpus
from gatewright.planner.job import Job, Layout
from gatewright.planner.legal import refusals
from gatewright.planner.legal_rule import Setting
from gatewright.planner.plan_run import layout_of, plan_run
from gatewright.planner.search import describe
from gatewright.planner.start import Devices, choose_layout, yardstick
from gatewright.planner.time import estimate_time, model_flops
from gatewright.spec.errors import RunFileError
from gatewright.spec.hardware import Cluster, Node
from gatewright.spec.run import Parallel, Run

LORA = {"adapter": {"rank": 16, "targets": ["attention"]}}
GRID = list(product(["Qwen3-8B", "Qwen3-30B-A3B", "OLMoE-1B-7B-0924"], ["h200", "mi250x-gcd"], [2, 8, 16], [LORA, {}]))


def on(gpu: str = "h200", *, ranks: int = 8, per_node: int = 8) -> Devices:
    return Devices(ranks=ranks, per_node=min(ranks, per_node), device="a device", gpu=find_gpu(gpu))


def open_run(method: dict[str, Any] = LORA, *, model: str = "Qwen3-30B-A3B", **sections: Any) -> Run:
    return make_run(method, model=model, **{"parallel": "auto", "hardware": None} | sections)


@pytest.mark.parametrize(("model", "gpu", "ranks", "method"), GRID)
def test_auto_is_what_the_planner_chooses(model: str, gpu: str, ranks: int, method: dict[str, Any]) -> None:
    run = open_run(method, model=model, train={"tokens_per_step": 2**17, "steps": 9, "lr": 1e-4})
    written = run.model_copy(update={"hardware": make_run(hardware={"gpu": gpu, "per_node": 8}).hardware})
    planned = plan_run(written, gpus=ranks).chosen
    if planned is None:
        with pytest.raises(RunFileError, match=f"auto finds no layout of {ranks} × {gpu}"):
            choose_layout(run, on(gpu, ranks=ranks))
        return
    chosen = choose_layout(run, on(gpu, ranks=ranks))
    assert isinstance(chosen.run.parallel, Parallel)
    assert describe(layout_of(chosen.run, ranks), gpu=find_gpu(gpu)) == planned.layout
    assert chosen.reason.startswith(f"planned for {gpu}, the best of ") and "s a step" in chosen.reason
    assert chosen == choose_layout(run, on(gpu, ranks=ranks)), "every rank must come to the same"


def test_a_layout_that_is_written_down_stays_and_one_rank_has_none() -> None:
    written = open_run(parallel={"ep": 4})
    assert choose_layout(written, on()).run == written
    assert choose_layout(open_run(), on(ranks=1)).run.parallel == "auto"


def test_what_cannot_be_planned_is_replicated_and_says_why() -> None:
    unknown = choose_layout(open_run(), Devices(ranks=2, per_node=2, device="CPU (x86_64, 1 thread)", gpu=None))
    assert unknown.run.parallel == Parallel()
    assert unknown.reason == "auto replicates: CPU (x86_64, 1 thread) is not in the planner's catalogue of GPUs"
    run = open_run()
    single = run.model_copy(update={"model": run.model.model_copy(update={"dtype": "float32"})})
    assert choose_layout(single, on()).run.parallel == Parallel()
    assert "model.dtype float32" in choose_layout(single, on()).reason


def test_auto_keeps_to_what_the_trainer_runs() -> None:
    """Documents that stay whole go without CP; adapters of some experts and 8-bit state are divided like any other."""
    many, few = ({"tokens_per_step": tokens, "steps": 9, "lr": 1e-4} for tokens in (2**17, 4096))
    experts = {"rank": 16, "targets": ["experts"]}
    large = {"model": "Qwen3-235B-A22B", "train": many}
    assert parallel_of(open_run({"adapter": experts}, **large)).ep == 8
    assert parallel_of(open_run({"adapter": experts | {"experts": {"most_routed": 0.5}}}, **large)).ep == 8

    one_each = open_run(model="Qwen3-8B", train=few)  # a step of one row for two ranks: only cut can both have some
    assert parallel_of(one_each, ranks=2).cp == 2
    whole = one_each.model_copy(update={"data": one_each.data.model_copy(update={"pack": False})})
    with pytest.raises(RunFileError, match="need at least 8,192 tokens a step"):
        choose_layout(whole, on(ranks=2))

    eight_bit = parallel_of(open_run({}, model="Qwen3-8B", train=many | {"optimizer": "adamw8bit"}))
    assert eight_bit.dense != "replicate"
    with pytest.raises(RunFileError, match="the nearest needs "):
        choose_layout(open_run({}, **large), on("mi250x-gcd"))


def parallel_of(run: Run, *, ranks: int = 8) -> Parallel:
    chosen = choose_layout(run, on(ranks=ranks)).run.parallel
    assert isinstance(chosen, Parallel)
    return chosen


@pytest.mark.parametrize(
    "model", ["Qwen3.5-35B-A3B", "Kimi-Linear-48B-A3B-Base", "DeepSeek-V3.2", "MiniMax-Text-01-hf"]
)
def test_cp_is_refused_where_something_runs_along_documents_past_the_keys(model: str) -> None:
    job = Job(shape=find_shape(model), method="lora", layout=Layout(ranks=2, cp=2))
    cluster = Cluster(node=Node(gpu=find_gpu("h200"), gpus=2))
    assert "cp-through-attention" in {found.rule for found in refusals(Setting(job=job, cluster=cluster))}
    assert not refusals(Setting(job=replace(job, layout=Layout(ranks=2)), cluster=cluster))


def test_devices_are_found_by_what_torch_calls_them() -> None:
    for gpu in gpus():
        assert gpu.device_names
        for name in gpu.device_names:
            assert find_device(name, memory_bytes=int(gpu.memory_bytes * 1.01)) == gpu
    h200 = find_gpu("h200")
    assert find_device("NVIDIA H200", memory_bytes=h200.memory_bytes // 7) is None, "a slice of one"
    assert find_device("NVIDIA H200 MIG 1g.18gb", memory_bytes=h200.memory_bytes) is None
    assert find_device("CPU (x86_64, 2 threads)", memory_bytes=0) is None


def test_mfu_is_the_plans_flops_over_the_data_sheets() -> None:
    run, devices = open_run(model="Qwen3-8B"), on(ranks=2)
    measure = yardstick(run, devices)
    assert measure is not None and measure.peak_flops_per_s == find_gpu("h200").bf16_flops_per_s
    assert yardstick(run, replace(devices, gpu=None)) is None

    job = Job(shape=find_shape("Qwen3-8B"), method="full", tokens_per_row=4096)
    flops = model_flops(job)
    estimate = estimate_time(job, Cluster(node=Node(gpu=find_gpu("h200"), gpus=1)), tokens_per_step=8 * 4096)
    assert flops.of_slices([(0, 4096)] * 8) == pytest.approx(estimate.flops_per_step)
    # 6 · parameters of matrices and 6 · heads · width · tokens of attention under the mask is what the field counts.
    assert flops.products == pytest.approx(6 * (8.19e9 - 151_936 * 4096), rel=0.01)

    peak = Yardstick(flops=flops, peak_flops_per_s=100.0)
    assert peak.mfu(400.0, seconds=2.0, ranks=4) == 0.5


@pytest.mark.parametrize("model", ["Qwen3-8B", "gpt-oss-20b", "Kimi-Linear-48B-A3B-Base"])
def test_flops_do_not_depend_on_how_documents_are_cut(model: str) -> None:
    flops: ModelFlops = model_flops(Job(shape=find_shape(model), method="lora"))
    whole = flops.of_slices([(0, 5000), (0, 37)])
    assert flops.of_slices([(0, 17), (0, 1200), (17, 37), (4000, 5000), (1200, 4000)]) == pytest.approx(whole)
    assert whole > flops.of_slices([(0, 37)] * (5037 // 37))
