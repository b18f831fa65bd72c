"""probe.json judged for a run: every rule is broken by one machine and kept by another, and a bad file is one line."""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from preflight_case import codes, verdict
from preflight_texts import File, axolotl, ours, trl

from gatewright.spec.errors import UserError
from gatewright.spec.hardware import GIB
from gatewright.spec.probe import (
    Allocator,
    AttentionKernel,
    Cache,
    Device,
    DeviceState,
    Disk,
    FourBit,
    Groups,
    Machine,
    Outcome,
    Probe,
    Shm,
    Versions,
    read_probe,
)

H200_BYTES = 150_016_000_000
DEVICE = Device(
    index=0,
    name="NVIDIA H200",
    architecture="sm_90",
    in_build=True,
    total_bytes=H200_BYTES,
    free_bytes=H200_BYTES - GIB,
    product_error=0.004,
    problem="",
)
KERNEL = AttentionKernel(
    kernel="torch varlen_attn",
    chosen=True,
    device="cuda",
    query_heads=16,
    key_heads=2,
    qk_dim=128,
    v_dim=128,
    tokens=2048,
    output_error=0.002,
    gradient_error=0.008,
    plain_error=0.006,
    problem="",
)
STATE = DeviceState(
    index=0,
    driver="580.95.05",
    clock_mhz=1980.0,
    most_clock_mhz=1980.0,
    temperature_c=31.0,
    power_limit_w=700.0,
    throttled="",
    uncorrected_errors=0,
)
CACHE = Cache(
    variable="TRITON_CACHE_DIR",
    path="/tmp/triton",
    given=True,
    kind="ext4",
    shared=False,
    in_home=False,
    writable=True,
    free_bytes=100 * GIB,
    free_inodes=10**7,
)
MACHINE = Machine(
    cpus=192,
    usable_cpus=list(range(96)),
    memory_bytes=2048 * GIB,
    available_bytes=1900 * GIB,
    limit_bytes=None,
    limit_used_bytes=None,
    clock_synchronised=True,
)
DISK = Disk(
    path="/scratch/runs",
    kind="lustre",
    free_bytes=20_000 * GIB,
    free_inodes=10**9,
    written_bytes=256 * 2**20,
    write_bytes_per_s=2e9,
    sync_s=0.002,
)
EXPANDABLE = Allocator(asked="expandable_segments:True", variable="PYTORCH_ALLOC_CONF", expandable=True)
GOOD = Probe(
    time="2026-11-30T00:00:00+00:00",
    host="node1",
    outcomes=[Outcome(name="devices", status="measured", text="8 × NVIDIA H200", seconds=3.0)],
    machine=MACHINE,
    versions=Versions(
        packages={"torch": "2.13.0", "flash-attn": "2.8.3"},
        cuda="13.0",
        hip=None,
        nccl="2.28.9",
        architectures=["sm_80", "sm_90"],
    ),
    devices=[replace(DEVICE, index=index) for index in range(8)],
    states=[STATE],
    attention=[KERNEL],
    allocator=EXPANDABLE,
    four_bit=FourBit(device="cuda", error=0.092, product_error=0.003),
    groups=Groups(backend="nccl", ranks=8, first_s=3.0, second_s=0.5, bytes_per_s=2e11),
    disk=DISK,
    shm=Shm(total_bytes=64 * GIB, free_bytes=64 * GIB),
    caches=[CACHE],
)
RUN = ours(method={"adapter": {"rank": 16}}, hardware={"gpu": "h200", "per_node": 8, "nodes": 2})
QLORA = ours(method={"adapter": {"rank": 16}, "quantize": "nf4"}, hardware={"gpu": "h200", "per_node": 8})
IN_FULL = ours(method={"adapter": None}, hardware={"gpu": "h200", "per_node": 8})
OFFLOADED = axolotl(fsdp=["full_shard"], fsdp_config={"fsdp_cpu_ram_efficient_loading": False})


def ended(name: str, status: Any, text: str = "no answer within 180 s, killed") -> dict[str, Any]:
    others = [item for item in GOOD.outcomes if item.name != name]
    return {"outcomes": [*others, Outcome(name=name, status=status, text=text, seconds=180.0)]}


@dataclass(frozen=True)
class Case:
    code: str
    broken: dict[str, Any]
    """Records that differ from the good machine's."""
    files: list[File] = field(default_factory=lambda: [RUN])


CASES = (
    Case("GW921", {"devices": [replace(DEVICE, free_bytes=10 * GIB)] * 8}),
    Case("GW922", {"devices": [DEVICE, replace(DEVICE, index=1, free_bytes=H200_BYTES // 2), *[DEVICE] * 6]}),
    Case("GW923", {"devices": [DEVICE] * 4}),
    Case("GW924", {"devices": [replace(DEVICE, total_bytes=85 * 10**9, free_bytes=84 * 10**9)] * 8}),
    Case("GW925", {"devices": [replace(DEVICE, architecture="sm_120", in_build=False)] * 8}),
    Case("GW926", {"devices": [replace(DEVICE, product_error=0.7)] * 8}),
    Case("GW927", {"states": [replace(STATE, throttled="power brake", clock_mhz=345.0)]}),
    Case("GW928", {"attention": [replace(KERNEL, output_error=None, problem="NaN or infinite: output")]}),
    Case("GW929", {"attention": [replace(KERNEL, kernel="sdpa per document")]}),
    Case("GW930", {"allocator": replace(EXPANDABLE, expandable=False)}),
    Case("GW931", ended("four_bit", "absent", "bitsandbytes is not installed"), [QLORA]),
    Case("GW932", ended("groups", "hung")),
    Case("GW933", {"disk": replace(DISK, free_bytes=GIB // 100)}),
    Case("GW934", {"disk": replace(DISK, write_bytes_per_s=1e4)}),
    Case("GW935", {"disk": replace(DISK, free_inodes=12)}),
    Case("GW936", ended("disk", "failed", "OSError: [Errno 122] Disk quota exceeded")),
    Case("GW937", {"shm": Shm(total_bytes=64 * 2**20, free_bytes=64 * 2**20)}),
    Case("GW938", {"machine": replace(MACHINE, limit_bytes=60 * GIB, limit_used_bytes=GIB)}, [OFFLOADED]),
    Case("GW938", {"machine": replace(MACHINE, limit_bytes=60 * GIB, limit_used_bytes=GIB)}, [IN_FULL]),
    Case("GW939", {"machine": replace(MACHINE, usable_cpus=[0])}),
    Case("GW940", {"caches": [replace(CACHE, path="/scratch/triton", kind="lustre", shared=True)]}),
    Case("GW941", {"caches": [replace(CACHE, writable=False)]}),
    Case("GW942", {"machine": replace(MACHINE, clock_synchronised=False)}),
    Case("GW943", ended("allocator", "hung")),
)  # fmt: skip


def judged(probe: Probe, files: list[File], folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    (folder / "probe.json").write_text(probe.as_json(), encoding="utf-8")
    return codes(verdict(files, folder / "files", {"probe": folder / "probe.json", "gpus": 8}))


@pytest.mark.parametrize("case", CASES, ids=[case.code for case in CASES])
def test_a_rule_finds_the_machine_that_breaks_it_and_only_that(case: Case, tmp_path: Path) -> None:
    assert case.code in judged(replace(GOOD, **case.broken), case.files, tmp_path / "bad")
    assert case.code not in judged(GOOD, case.files, tmp_path / "good")


def test_a_good_machine_yields_nothing_and_a_bare_one_no_error(tmp_path: Path) -> None:
    bare = Probe(time=GOOD.time, host="laptop", outcomes=[])
    assert [code for code in judged(GOOD, [RUN], tmp_path / "good") if code >= "GW921"] == []
    assert [code for code in judged(bare, [RUN], tmp_path / "bare") if code >= "GW921"] == []


@pytest.mark.parametrize(
    ("name", "total_gib", "known"),
    [
        ("NVIDIA H200", 139.72, True),
        ("NVIDIA H100 80GB HBM3", 79.1, True),
        ("AMD Instinct MI300X", 191.98, True),
        ("NVIDIA H200", 79.1, False),
        ("Tesla K80", 11.2, False),
    ],
)
def test_a_config_that_names_no_gpu_is_judged_for_the_one_that_is_here(
    name: str, total_gib: float, known: bool, tmp_path: Path
) -> None:
    here = replace(DEVICE, name=name, total_bytes=int(total_gib * GIB), free_bytes=GIB)
    found = judged(replace(GOOD, devices=[here] * 8), [axolotl(sample_packing=True)], tmp_path / "run")
    assert ("GW921" in found) is known


def test_flash_attention_that_is_not_installed(tmp_path: Path) -> None:
    without = replace(GOOD, versions=replace(GOOD.versions, packages={"torch": "2.13.0"}))  # type: ignore[type-var]
    asked = [axolotl(attn_implementation="flash_attention_2")]
    assert "GW929" in judged(without, asked, tmp_path / "bad")
    assert "GW929" not in judged(GOOD, asked, tmp_path / "good")


def test_kernels_that_are_as_exact_as_16_bits_allow_are_not_blamed(tmp_path: Path) -> None:
    rough = replace(GOOD, attention=[replace(KERNEL, gradient_error=0.029)])
    wrong = replace(GOOD, attention=[replace(KERNEL, gradient_error=0.2)])
    assert "GW928" not in judged(rough, [RUN], tmp_path / "rough")
    assert "GW928" in judged(wrong, [RUN], tmp_path / "wrong")


def test_the_sentence_has_the_numbers_of_plan_and_machine(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(replace(GOOD, devices=[replace(DEVICE, free_bytes=10 * GIB)] * 8).as_json())
    found = verdict([RUN], tmp_path / "files", {"probe": tmp_path / "p.json"})
    [text] = [finding.text for finding in found.findings if finding.code == "GW921"]
    assert "10.0 of 139.7" in text and "the plan needs" in text and found.exit_code == 1


def test_space_is_judged_by_what_trains_and_how_many_are_kept(tmp_path: Path) -> None:
    """Full fine-tuning of 8 B parameters in the HF Trainer: 2 bytes and two bf16 moments each, unlimited saves."""
    full = trl(max_steps=1000, save_steps=100, max_length=4096)
    probe = replace(GOOD, disk=replace(DISK, free_bytes=300 * GIB))
    assert "GW933" in judged(probe, [full], tmp_path / "ten")
    assert "GW933" not in judged(probe, [trl(max_steps=1000, save_steps=100, save_total_limit=2)], tmp_path / "two")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON, or is cut off"),
        ("[]", "version list, wanted 1"),
        ('{"version": 2}', "version 2, wanted 1"),
        ('{"version": 1, "time": "", "host": "", "outcomes": 3}', "outcomes:"),
        ('{"version": 1, "time": "", "host": "", "outcomes": [], "shm": {"total_bytes": "x"}}', "shm.total_bytes"),
        ("[" * 5000, "not JSON, or is cut off"),
    ],
)
def test_a_file_that_is_no_probe_is_one_sentence(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_probe(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_probe_is_refused_or_judged_and_never_a_crash(tmp_path: Path) -> None:
    """120 files with a value broken at random."""
    draw = random.Random(0)
    strange = [None, -1, 0, 10**30, 1e308, "", "x" * 1000, [], {}, True]
    refused = 0
    for index in range(120):
        values = json.loads(GOOD.as_json())
        place: Any = values
        while True:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.9:
                place = place[key]
                continue
            place[key] = draw.choice(strange)
            break
        path = tmp_path / f"{index}.json"
        path.write_text(json.dumps(values))
        try:
            verdict([RUN], tmp_path / "files", {"probe": path})
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 20 < refused < 115


def test_a_probe_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(GOOD.as_json())
    assert read_probe(path) == GOOD
    assert json.loads(GOOD.as_json())["machine"]["cpus"] == 192
    with pytest.raises(UserError, match="cannot be read"):
        read_probe(tmp_path / "none.json")
