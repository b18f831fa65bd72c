"""The machine under the run: its device, its memory, the versions that matter."""

import platform
import resource
from importlib import metadata

import torch

from gatewright import __version__


def pick_device() -> torch.device:
    """The first CUDA or ROCm device if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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
