"""Host memory for one copy of a run's state: what is saved from it, steps that go on no longer touch."""

import torch
from torch import Tensor


class HostCopy:
    """Tensors by name, in memory that is kept from save to save: fresh pages cost several times the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor, contiguous, in the host's memory; valid until the next of that name is taken."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept.copy_(tensor.detach())
