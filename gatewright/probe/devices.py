"""GPUs as torch sees them: memory, code for their architecture, a product against the CPU's; versions; allocator."""

import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from gatewright.probe.absent import NO_GPU, Absent
from gatewright.probe.children import Wanted
from gatewright.spec.probe import Allocator, Device, Versions

GIB = 2**30
SIDE = 1024
"""Of the matrices that are multiplied."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATED_BYTES = 64 * 2**20
PACKAGES = (
    "gatewright",
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "triton",
    "pytorch-triton-rocm",
    "liger-kernel",
)


def measure_versions(wanted: Wanted) -> tuple[str, dict[str, object]]:
    packages = {name: found for name in PACKAGES if (found := installed(name)) is not None}
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    versions = Versions(
        packages=packages,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        architectures=torch.cuda.get_arch_list(),
    )
    built = f"CUDA {versions.cuda}" if versions.cuda else f"ROCm {versions.hip}" if versions.hip else "no GPU"
    shown = ", ".join(f"{name} {packages[name]}" for name in ("transformers", "peft", "flash-attn") if name in packages)
    return f"torch {torch.__version__} built for {built}; {shown}", asdict(versions)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def measure_devices(wanted: Wanted) -> tuple[str, list[dict[str, object]]]:
    if not torch.cuda.is_available():
        raise Absent(NO_GPU)
    built = torch.cuda.get_arch_list()
    devices = [look(index, built) for index in range(torch.cuda.device_count())]
    bad = [f"GPU {device.index}: {device.problem}" for device in devices if device.problem]
    least = min(devices, key=lambda device: device.free_bytes)
    text = (
        f"{len(devices)} × {devices[0].name} ({devices[0].architecture}), at least {least.free_bytes / GIB:.1f} of "
        f"{least.total_bytes / GIB:.1f} GiB free"
    )
    return text + (f"; {'; '.join(bad)}" if bad else ""), [asdict(device) for device in devices]


def look(index: int, built: list[str]) -> Device:
    """One device; what it raises is kept, so that the others are looked at too."""
    properties = torch.cuda.get_device_properties(index)
    architecture = architecture_of(index)
    error, problem, free, total = None, "", 0, properties.total_memory
    try:
        free, total = torch.cuda.mem_get_info(index)
        error = product_error(torch.device("cuda", index))
    except RuntimeError as raised:
        problem = str(raised).strip().splitlines()[0]
    return Device(
        index=index,
        name=properties.name,
        architecture=architecture,
        in_build=runs(architecture, built),
        total_bytes=total,
        free_bytes=free,
        product_error=error,
        problem=problem,
    )


def architecture_of(index: int) -> str:
    """sm_90, or gfx90a without the features after the colon."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def runs(architecture: str, built: list[str]) -> bool:
    """Whether a build for these architectures has code for this one: its own, of an earlier minor version, or PTX."""
    names = {name.partition(":")[0] for name in built}
    if not architecture.startswith("sm_"):
        return architecture in names
    number = int(architecture[3:])
    if number in {int(name[3:].rstrip("af")) for name in names if name.startswith("sm_")}:
        return True
    # code for sm_90a runs there alone; of another minor version only plain and family code does
    earlier = [int(n[3:].rstrip("f")) for n in names if n.startswith("sm_") and not n.endswith("a")]
    same_major = any(other // 10 == number // 10 and other <= number for other in earlier)
    ptx = [int(n[8:]) for n in names if n.startswith("compute_") and n[8:].isdecimal()]
    return same_major or any(other <= number for other in ptx)


def product_error(device: torch.device) -> float:
    """Largest difference of a bf16 product to the CPU's float32 product of the same entries, over the largest entry."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=generator).bfloat16() for _ in range(2))
    there = (a.to(device) @ b.to(device)).float().cpu()
    here = a.float() @ b.float()
    return float((there - here).abs().max() / here.abs().max())


def measure_allocator(wanted: Wanted) -> tuple[str, dict[str, object]]:
    if not torch.cuda.is_available():
        raise Absent(NO_GPU)
    held = torch.empty(ALLOCATED_BYTES, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    expandable = any(segment.get("is_expandable", False) for segment in segments)
    del held
    variable = next((name for name in ALLOCATOR_VARIABLES if "expandable_segments" in os.environ.get(name, "")), "")
    allocator = Allocator(asked=os.environ.get(variable, ""), variable=variable, expandable=expandable)
    asked = f"{variable}={allocator.asked}" if variable else "not asked for"
    return f"expandable segments are {'on' if expandable else 'off'} ({asked})", asdict(allocator)
