"""The probe: measurements that are true of this machine, children that hang or die, readings of what drivers print."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from gatewright.model.attention import Kernel, attend_each_document
from gatewright.packing.cost import device_rates, read_rates
from gatewright.probe import costs
from gatewright.probe.absent import Absent
from gatewright.probe.attention import Heads, gradients, heads_of, inputs, judge, measure_attention
from gatewright.probe.caches import look
from gatewright.probe.child import finite
from gatewright.probe.children import MEASUREMENTS, NAMES, Wanted, measure, probe, read_answer, run_child
from gatewright.probe.devices import measure_allocator, measure_devices, runs
from gatewright.probe.driver import ask_nvidia, read_nvidia, read_rocm
from gatewright.probe.four_bit import measure_four_bit
from gatewright.probe.links import link_rates
from gatewright.probe.machine import cgroup_limit, meminfo, ranges
from gatewright.probe.storage import existing, file_system, measure_disk
from gatewright.report.probe_text import render_probe
from gatewright.spec.errors import ModelError, UserError
from gatewright.spec.probe import Costs, Outcome, Probe, read_probe, record

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


# --- children ---------------------------------------------------------------------------------------------------


def test_a_hung_child_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('waiting for the ring', file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    assert run_child([sys.executable, "-c", code], errors=tmp_path / "stderr", timeout_s=3) is None
    assert time.monotonic() - began < 30
    deadline = time.monotonic() + 10
    while alive(pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid.read_text())
    status, text, value = read_answer(None, tmp_path / "answer", tmp_path / "stderr", timeout_s=3)
    assert (status, value) == ("hung", None)
    assert text == "no answer within 3 s, killed; its last words: waiting for the ring"


def alive(pid: str) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV: it said nothing"),
        ("import sys; sys.exit('HSA_STATUS_ERROR')", "ended with exit code 1: HSA_STATUS_ERROR"),
    ],
)
def test_a_child_that_dies_says_how(code: str, says: str, tmp_path: Path) -> None:
    ended = run_child([sys.executable, "-c", code], errors=tmp_path / "stderr", timeout_s=30)
    assert read_answer(ended, tmp_path / "answer", tmp_path / "stderr", timeout_s=30) == ("failed", says, None)


def test_a_measurement_without_time_is_hung_and_has_no_number() -> None:
    [disk] = [item for item in MEASUREMENTS if item.name == "disk"]
    outcome, value = measure(disk, Wanted(), timeout_s=0.01)
    assert (outcome.status, value) == ("hung", None)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UserError, match=r"No measurement is called 'gpu'\. Known: machine"):
        probe(Wanted(), only=["gpu"])


def test_numbers_that_json_cannot_say_are_left_out() -> None:
    assert finite({"a": [float("nan"), 1.0, float("inf")], "b": "x"}) == {"a": [None, 1.0, None], "b": "x"}


# --- what is true of this machine -------------------------------------------------------------------------------


def test_the_node_is_measured_and_read_back(tmp_path: Path) -> None:
    wanted = Wanted(folder=str(tmp_path / "runs" / "a"), write_bytes=2**21)
    found = probe(wanted, only=["machine", "disk", "shm", "caches", "driver"])
    assert found.machine is not None and found.disk is not None and found.caches is not None
    assert found.machine.usable_cpus == sorted(os.sched_getaffinity(0))
    assert 0 < found.machine.available_bytes <= found.machine.memory_bytes
    assert found.disk.path == str(tmp_path.resolve()) and found.disk.written_bytes == 2**21
    assert found.disk.write_bytes_per_s > 0 and list(tmp_path.iterdir()) == []
    (tmp_path / "probe.json").write_text(found.as_json())
    assert read_probe(tmp_path / "probe.json") == found
    text = render_probe(found)
    assert max(map(len, text.splitlines())) <= 100 and "disk         ok" in text


@needs_no_gpu
def test_without_a_gpu_nothing_is_made_up() -> None:
    for measured in (measure_devices, measure_allocator):
        with pytest.raises(Absent, match="no CUDA or ROCm device"):
            measured(Wanted())


@needs_no_gpu
def test_costs_are_measured_between_processes_and_steer_a_cost_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(costs.LENGTHS, "cpu", (64, 256))
    monkeypatch.setitem(costs.ROWS, "cpu", 64)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
                   | {"moe_intermediate_size": 128, "num_experts_per_tok": 2})
    )  # fmt: skip
    text, value = costs.measure_costs(Wanted(model=str(tmp_path)))
    assert text.startswith("float32: products ") and "gloo, 2 ranks: " in text
    found = record(Costs, value, what="costs")
    assert found.ranks == 2 and found.bytes_per_s and found.hop_s is not None and found.slot_s
    assert [(point.tokens, point.ranks) for point in found.points] == [(s, c) for s in (64, 256) for c in (1, 2, 4)]
    # A file with them gives the rates of a schedule; nothing of them is the catalogue's but the ranks of a node.
    probe_json = tmp_path / "probe.json"
    probe_json.write_text(Probe(time="", host="", outcomes=[], costs=found).as_json())
    rates = read_rates(probe_json)
    assert rates.attention_flops_per_s == found.attention_flops_per_s and rates.hop_s == found.hop_s
    assert (rates.near_bytes_per_s, rates.hidden) == (found.bytes_per_s, 0.0)
    assert rates.source == "measured by a probe of cpu, float32, 2 ranks"


def test_a_fit_finds_the_rate_and_the_tiles_that_its_times_were_made_of() -> None:
    def taken(tokens: int, ranks: int) -> float:
        return 3e-9 * tokens * (tokens / ranks + (1 if ranks == 1 else 2) * 40)

    timed = {(tokens, ranks): taken(tokens, ranks) for tokens in (500, 1000, 4000) for ranks in (1, 2, 4)}
    each_s, tile_tokens, points = costs.fitted(timed)
    assert each_s == pytest.approx(3e-9) and tile_tokens == 40
    assert all(point.fitted_s == pytest.approx(point.seconds) for point in points)
    # Times that only noise could make give no tile of fewer than no rows.
    each_s, tile_tokens, _ = costs.fitted({(500, 1): 1e-4, (1000, 1): 1e-3, (500, 2): 1e-5})
    assert each_s > 0 and tile_tokens == 0
    links = link_rates((10**3, 10**6), [3e-5, 2.997e-3], backend="gloo", ranks=4)
    assert links.bytes_per_s == pytest.approx(3 * 999_000 / 2.967e-3, rel=1e-6)
    assert links.hop_s == pytest.approx((3e-5 - 2.967e-3 * 1000 / 999_000) / 3, rel=1e-6)


def test_a_probe_without_costs_says_how_to_get_them(tmp_path: Path) -> None:
    ended = Outcome(name="costs", status="hung", text="no answer within 300 s", seconds=300.0)
    path = tmp_path / "probe.json"
    path.write_text(Probe(time="", host="", outcomes=[ended]).as_json())
    with pytest.raises(UserError, match=r"no measured costs in it \(hung: no answer.*gatewright probe --attention"):
        read_rates(path)


@pytest.mark.parametrize(
    ("device", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
        ("CPU (AMD64, 2 threads)", "cpu"),
    ],
)
def test_rates_of_a_device_by_the_name_its_driver_gives(device: str, row: str) -> None:
    assert device_rates(device).gpu == row


@needs_no_gpu
def test_two_groups_of_two_processes_reduce_on_a_cpu() -> None:
    found = probe(Wanted(), only=["groups"])
    assert found.groups is not None, found.outcomes
    assert (found.groups.backend, found.groups.ranks) == ("gloo", 2)
    assert found.groups.bytes_per_s > 0


@needs_no_gpu
def test_the_trainers_own_kernel_is_exact_at_the_models_head_size(tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, [kernel] = measure_attention(Wanted(model=str(tmp_path)))
    assert (kernel["query_heads"], kernel["key_heads"], kernel["qk_dim"]) == (16, 2, 64)
    assert kernel["problem"] == "" and kernel["chosen"] is True
    assert 0 < kernel["output_error"] < 0.02 and 0 < kernel["gradient_error"] < 0.03  # type: ignore[operator]


def test_kernels_that_look_across_documents_or_give_nan_are_found() -> None:
    heads, bounds = Heads(query=2, key=2, qk_dim=32, v_dim=32), torch.tensor([0, 30, 64]).int()
    tensors = inputs(heads, tokens=64, device=torch.device("cpu"))
    exact = gradients(attend_each_document, *(x.float() for x in tensors), bounds, 34)

    def across(q, k, v, bounds, *rest):  # type: ignore[no-untyped-def]
        return attend_each_document(q, k, v, torch.tensor([0, 64]), *rest)

    def no_number(q, k, v, *rest):  # type: ignore[no-untyped-def]
        return attend_each_document(q, k, v / 0, *rest)

    def raises(*rest):  # type: ignore[no-untyped-def]
        raise RuntimeError("no kernel image is available\nfor execution")

    good = judge(Kernel("good", "", attend_each_document), tensors, bounds, 34, exact)
    assert good[0] is not None and good[0] < 0.02 and good[2] == ""
    wrong = judge(Kernel("wrong", "", across), tensors, bounds, 34, exact)
    assert wrong[0] is not None and wrong[0] > 0.1
    assert judge(Kernel("nan", "", no_number), tensors, bounds, 34, exact)[2].startswith("NaN or infinite: output")
    assert judge(Kernel("raises", "", raises), tensors, bounds, 34, exact)[2] == "no kernel image is available"


def test_the_four_bit_round_trip_is_what_nf4_gives() -> None:
    pytest.importorskip("bitsandbytes")
    _, value = measure_four_bit(Wanted())
    assert 0.08 < value["error"] < 0.10  # type: ignore[operator]


def test_a_full_or_closed_disk_is_a_failure_with_its_words(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    with pytest.raises(OSError, match="nothing was written"):
        measure_disk(Wanted(folder=str(tmp_path), write_bytes=10))


# --- readings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "heads"),
    [
        ({"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}, Heads(16, 2)),
        ({"text_config": {"num_attention_heads": 16, "hidden_size": 2048}}, Heads(2, 2)),
        (
            {
                "num_attention_heads": 128,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            Heads(2, 2, 192, 128),
        ),
    ],
)
def test_heads_of_a_model(values: dict[str, object], heads: Heads, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert heads_of(tmp_path) == heads


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"num_attention_heads": 0, "hidden_size": 4}', '{"num_attention_heads": "x"}', "[]"]
)
def test_a_config_without_heads_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        heads_of(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "built", "wanted"),
    [
        ("gfx90a", ["gfx90a:sramecc+", "gfx942"], True),
        ("gfx1151", ["gfx90a", "gfx942"], False),
        ("sm_90", ["sm_80", "sm_90a"], True),
        ("sm_89", ["sm_80", "sm_86"], True),
        ("sm_120", ["sm_80", "sm_90"], False),
        ("sm_120", ["sm_80", "compute_90"], True),
        ("sm_75", ["sm_80"], False),
        ("sm_103", ["sm_100a"], False),
        ("sm_103", ["sm_100f"], True),
    ],
)
def test_code_for_an_architecture(architecture: str, built: list[str], wanted: bool) -> None:
    assert runs(architecture, built) is wanted


def test_memory_limits_of_both_versions_of_control_groups(tmp_path: Path) -> None:
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (tmp_path / "slurm" / "memory.max").write_text("64424509440\n")
    (tmp_path / "slurm" / "memory.current").write_text("1024\n")
    assert cgroup_limit("0::/slurm/job_7\n", tmp_path) == (64424509440, 1024)
    old = tmp_path / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("1000000\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limit("5:cpu:/job\n4:memory,hugetlb:/job\n", tmp_path) == (1000000, None)
    assert cgroup_limit("", tmp_path) == (None, None)
    assert meminfo("MemTotal:  10 kB\nHugePages: 0\n") == {"MemTotal": 10240, "HugePages": 0}
    assert ranges([0, 1, 2, 8, 10, 11]) == "0-2, 8, 10-11"


def test_the_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = f"overlay / overlay rw 0 0\nsrv:/x {tmp_path} nfs4 rw 0 0\nbroken\n"
    assert file_system(tmp_path, mounts) == "nfs4"
    assert file_system(tmp_path.parent / f"{tmp_path.name}2", mounts) == "overlay"


def test_a_cache_is_where_its_variable_says(tmp_path: Path) -> None:
    there = look("TRITON_CACHE_DIR", "~/.triton/cache", {"TRITON_CACHE_DIR": str(tmp_path / "new")})
    assert there.given and there.writable and there.path == str(tmp_path / "new") and not there.shared
    default = look("TRITON_CACHE_DIR", "~/.triton/cache", {})
    assert not default.given and default.in_home


NVIDIA = """\
0, 580.95.05, 1980, 1980, 34, 700.00, 0, Not Active, Not Active, Not Active
1, 580.95.05, 345, 1980, 88, 700.00, 2, Active, Not Active, Active
2, 580.95.05, [N/A], 1980, 40, [N/A], [N/A], [N/A], [N/A], [N/A]
"""
ROCM = {
    "card0": {
        "Temperature (Sensor junction) (C)": "43.0",
        "sclk clock speed:": "(1700Mhz)",
        "Max Graphics Package Power (W)": "500.0",
    },
    "system": {"Driver version": "6.12.12"},
}


def test_what_the_drivers_tools_print() -> None:
    first, second, third = read_nvidia(NVIDIA)
    assert (first.throttled, first.uncorrected_errors, first.clock_mhz) == ("", 0, 1980.0)
    assert second.throttled == "hardware thermal slowdown, software thermal slowdown" and second.uncorrected_errors == 2
    assert third.clock_mhz is None and third.uncorrected_errors is None
    idle = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"
    assert read_rocm(idle + json.dumps(ROCM)) == read_rocm(json.dumps(ROCM))
    [card] = read_rocm(json.dumps(ROCM))
    assert (card.driver, card.clock_mhz, card.temperature_c, card.power_limit_w) == ("6.12.12", 1700.0, 43.0, 500.0)


def test_an_older_nvidia_driver_is_asked_by_the_older_names(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    refusal = 'Field "clocks_event_reasons.hw_thermal_slowdown" is not a valid field to query.'
    tool.write_text(f"#!/bin/sh\ncase \"$1\" in *event_reasons*) echo '{refusal}'; exit 2;; esac\nprintf '{NVIDIA}'\n")
    tool.chmod(0o755)
    assert len(read_nvidia(ask_nvidia(str(tool)))) == 3


def test_every_measurement_has_a_line_on_the_screen() -> None:
    outcomes = [Outcome(name=name, status="absent", text="word " * 60, seconds=0.0) for name in NAMES]
    text = render_probe(Probe(time="t", host="h", outcomes=outcomes))
    assert max(map(len, text.splitlines())) <= 100 and f"{len(NAMES)} absent" in text
