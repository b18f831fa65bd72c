"""CPUs, memory and clock of this node, as this process may use them."""

import ctypes
import os
from dataclasses import asdict
from pathlib import Path

from gatewright.probe.children import Wanted
from gatewright.spec.probe import Machine

GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 2**60
"""cgroup v1 writes a number near 2**63 for none."""
TIME_ERROR = 5
"""State of adjtimex(2): the clock is not synchronised."""


def measure_machine(wanted: Wanted) -> tuple[str, dict[str, object]]:
    usable = sorted(os.sched_getaffinity(0))
    memory = meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"))
    limit, used = cgroup_limit(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CGROUPS)
    machine = Machine(
        cpus=os.cpu_count() or len(usable),
        usable_cpus=usable,
        memory_bytes=memory["MemTotal"],
        available_bytes=memory["MemAvailable"],
        limit_bytes=limit,
        limit_used_bytes=used,
        clock_synchronised=clock_synchronised(),
    )
    of_limit = f", limit {limit / GIB:.1f}" if limit is not None else ", no limit"
    clock = {True: "synchronised", False: "not synchronised", None: "unknown"}[machine.clock_synchronised]
    return (
        f"{len(usable)} of {machine.cpus} CPUs ({ranges(usable)}); {machine.available_bytes / GIB:.1f} of "
        f"{machine.memory_bytes / GIB:.1f} GiB of memory available{of_limit}; clock {clock}",
        asdict(machine),
    )


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def cgroup_limit(membership: str, root: Path) -> tuple[int | None, int | None]:
    """Smallest memory limit of the groups that hold this process, and what is used of it; versions 1 and 2."""
    found: list[tuple[int, int | None]] = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, limit_name, used_name = root / path.lstrip("/"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = root / "memory" / path.lstrip("/")
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while folder != root.parent:
            limit = number_in(folder / limit_name)
            if limit is not None and limit < NO_LIMIT:
                found.append((limit, number_in(folder / used_name)))
            folder = folder.parent
    return min(found, key=lambda item: item[0]) if found else (None, None)


def number_in(path: Path) -> int | None:
    """The integer in a file; None where there is no such file, or it says `max`."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def clock_synchronised() -> bool | None:
    """What the kernel says of its clock; None where it cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(256))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def ranges(numbers: list[int]) -> str:
    """`0-3, 8`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
