"""The machine under the run: its device, its memory, the versions that matter."""

import platform
import resource
from importlib import metadata

import torch

from gatewright import __version__
from gatewright.spec.errors import UserError


def pick_device(local_rank: int = 0) -> torch.device:
    """This process's CUDA or ROCm device if there are any, by its number on the machine, else the CPU.

    Where a launcher shows each process one device only, that is the one. Raises UserError for more ranks than devices.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise UserError(f"rank {local_rank} of this machine has no GPU: there are {count}; start at most {count} ranks")
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' * (threads > 1)})"


def peak_memory_bytes(device: torch.device) -> int:
    """Peak so far: bytes allocated on a GPU, resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "peft")}
    return {"gatewright": __version__, "python": platform.python_version(), **packages}
