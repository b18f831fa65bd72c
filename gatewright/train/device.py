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


def device_memory_bytes(device: torch.device) -> int:
    """What the driver says a GPU has; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def peak_memory_bytes(device: torch.device) -> int:
    """Peak so far: bytes allocated on a GPU, resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Peak so far of what the allocator has taken from a GPU; 0 on a CPU, which has no such pool."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def rng_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """State of the random numbers on the CPU and on the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    """Puts back what `rng_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "peft")}
    return {"gatewright": __version__, "python": platform.python_version(), **packages}
