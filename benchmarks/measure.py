"""What a contestant's process measures of itself: resident memory from /proc, and the machine's matmul rate."""

import time
from pathlib import Path

import torch


def resident_bytes() -> int:
    """Resident set of this process now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident set of this process since its start, or since forget_peak."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Sets the kernel's high-water mark back to what is resident now (Linux, proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def matmul_rate(rows: int, inner: int, columns: int, *, dtype: torch.dtype, repeats: int = 20) -> float:
    """Best FLOP/s of torch's own matmul for [rows, inner] × [inner, columns] into memory that exists already."""
    a, b, out = (torch.ones(shape, dtype=dtype) for shape in ((rows, inner), (columns, inner), (rows, columns)))
    best_s = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(a, b.t(), out=out)
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * rows * inner * columns / best_s


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
