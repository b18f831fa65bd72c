"""Fake tensors: the operations of a step on shapes alone, with the few values that decide shapes kept real.

Under torch's FakeTensorMode a tensor has a shape and a type but no memory. Three things stop a training step there, and
all are answered here:

- Document boundaries, positions and labels are read as numbers (`tolist`, `nonzero`). They are small, so they stay
  real, and an operation whose tensors are all real is executed.
- The loss, the gradient norm and the routing counts are read, but their values decide no shape. A float read from a
  fake tensor is 1.0, a bool is true ("it is finite"), and `bincount` has as many rows as the caller says there are
  experts. An integer could decide a shape: reading one stays an error; seeds of dropout are drawn.
- Which rows an expert's capacity or a choice of experts leaves is a shape. `nonzero` of a mask over rows is all of
  them: an upper bound, which the account must say.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gatewright.model.quantized import QuantizedWeight

aten = torch.ops.aten
WRAPPERS = (DTensor, AsyncCollectiveTensor, QuantizedWeight)
"""Tensors without storage of their own: an operation on one is left to it, and what it does inside is seen."""


class _Values(TorchDispatchMode):
    """Sits above FakeTensorMode and decides for each operation: execute, answer, or leave to shapes."""

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if not types and any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            with unset_fake_temporarily():  # no fake tensor among them, so these are real
                return func(*args, **kwargs)
        answer = _ANSWERS.get(func)
        return func(*args, **kwargs) if answer is None else answer(*args, **kwargs)


def _scalar(tensor: Tensor) -> float | int | bool:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else aten._local_scalar_dense.default(tensor)


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        return aten.bincount.default(tensor, weights, minlength)
    return tensor.new_zeros(minlength, dtype=torch.int64)


def _randint(high: int, size: list[int], **kwargs: Any) -> Tensor:
    """Drawn, since it is a seed."""
    with unset_fake_temporarily():
        return aten.randint.default(high, size, **kwargs)


def _nonzero(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.bool or tensor.dim() != 1:
        return aten.nonzero.default(tensor)
    return tensor.new_empty(len(tensor), 1, dtype=torch.int64)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """torch 2.13 runs float32 on the CPU but knows the result's shape for bfloat16 only."""
    if a.dtype == torch.bfloat16 or offs is None:
        return aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    groups = (len(offs),) if a.dim() == b.dim() else ()
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.bincount.default: _bincount,
    aten.nonzero.default: _nonzero,
    aten.randint.default: _randint,
    aten._grouped_mm.default: _grouped_mm,
}


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Inside the block new tensors are fake; real ones made outside stay real among themselves."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _Values(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # FSDP compares two
        yield mode


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces the parameters and buffers of a model on the meta device by fake tensors on the CPU; ties stay ties.

    Modules are built and adapted on the meta device, since PEFT moves what it makes, and fake parameters cannot move.
    """
    cpu, known = torch.device("cpu"), {}

    def plain(tensor: Tensor) -> Tensor:
        return mode.fake_tensor_converter.from_meta_and_device(mode, tensor, cpu)

    def copied(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return DTensor.from_local(
                plain(tensor.to_local().detach()), tensor.device_mesh, tensor.placements,
                run_check=False, shape=tensor.shape, stride=tensor.stride(),
            )  # fmt: skip
        if isinstance(tensor, QuantizedWeight):
            return tensor.rebuild(plain, tensor.dtype)
        return plain(tensor.data)

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = copied(tensor)
            if isinstance(tensor, nn.Parameter):
                known[id(tensor)] = nn.Parameter(known[id(tensor)], requires_grad=tensor.requires_grad)
        return known[id(tensor)]

    for module in model.modules():
        for own in (module._parameters, module._buffers):
            own |= {name: fake(tensor) for name, tensor in own.items() if tensor is not None}
