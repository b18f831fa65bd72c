"""Frozen weights in few bits: a tensor that keeps the shape of what it replaces and is made dense a layer at a time.

A quantised weight sits where the dense one sat, as the parameter of an `nn.Linear` or of a fused experts module. Only
two things may be done with it: it can be a linear layer's weight, and the experts seam can multiply by it. Both make it
dense in the forward pass and once more in the backward pass, and keep nothing but the packed bytes in between.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gatewright.spec.errors import ModelError

aten = torch.ops.aten
ALIGNED_BYTES = 16
"""Where the packed bytes of a matrix and of each of its parts may begin, so that they can be read as any type."""


class QuantizedWeight(Tensor):
    """Base of the formats: a tensor of the dense shape and type without storage, and the packed tensors behind it.

    A format gives `dense`, and its fields through `parts`; see four_bit.py and fp8.py.
    """

    parts: dict[str, Tensor]
    """What is really held, by name; of a stack, with one entry for each matrix along the first axis."""

    @staticmethod
    def __new__(cls, parts: dict[str, Tensor], *, shape: torch.Size, dtype: torch.dtype, **details: Any) -> Self:
        device = next(iter(parts.values())).device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, parts: dict[str, Tensor], *, shape: torch.Size, dtype: torch.dtype, **details: Any) -> None:
        """`details`: what else the format must know to make the weight dense."""
        self.parts = parts
        self.details = details

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as an ordinary tensor, newly made."""
        raise NotImplementedError

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed tensors."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def matrices(self) -> int:
        """1, or how many a stack has."""
        return self.shape[0] if self.dim() == 3 else 1

    @property
    def matrix_bytes(self) -> int:
        """What `packed_EB` has for each matrix."""
        sizes = [part.nbytes // self.matrices for part in self.parts.values()]
        return sum(size + -size % ALIGNED_BYTES for size in sizes)

    def packed_EB(self) -> Tensor:
        """uint8 [matrices, bytes of one]: the packed parts of each matrix, one after the other."""
        parts = [part.reshape(self.matrices, -1).view(torch.uint8) for part in self.parts.values()]
        return torch.cat([F.pad(part, (0, -part.shape[1] % ALIGNED_BYTES)) for part in parts], dim=1)

    def unpack(self, packed_EB: Tensor) -> Self:
        """The weight, or the stack of so many, that has these packed bytes and is otherwise like this one."""
        parts, begin = {}, 0
        for name, part in self.parts.items():
            size = part.nbytes // self.matrices
            mine = packed_EB[:, begin : begin + size].contiguous().view(part.dtype)
            parts[name] = mine.view(part.shape if self.dim() == 2 else (len(packed_EB), *part.shape[1:]))
            begin += size + -size % ALIGNED_BYTES
        shape = self.shape if self.dim() == 2 else torch.Size([len(packed_EB), *self.shape[1:]])
        return type(self)(parts, shape=shape, dtype=self.dtype, **self.details)

    def rebuild(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Self:
        parts = {name: change(part) for name, part in self.parts.items()}
        return type(self)(parts, shape=self.shape, dtype=dtype, **self.details)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.stored_bytes:,} bytes, {self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight, kwargs = args[0], kwargs or {}
        if isinstance(weight, QuantizedWeight):
            if func in (aten.detach.default, aten.alias.default):
                return weight.rebuild(lambda part: part, weight.dtype)
            if func is aten.clone.default:
                return weight.rebuild(torch.clone, weight.dtype)
            if func is aten._to_copy.default:
                device = kwargs.get("device") or weight.device
                return weight.rebuild(lambda part: part.to(device), kwargs.get("dtype") or weight.dtype)
        raise ModelError(
            f"method.quantize: this architecture applies {func} to a weight that is stored in few bits; only linear "
            "layers and experts can take one. Set method.quantize: none"
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b with W dense only while it multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_x = grad @ ctx.weight.dense(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the model's parameters occupy in this process, a shared one counted once."""
    return sum(held_bytes(parameter) for parameter in model.parameters())


def held_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter in this process: packed if it is in few bits, its part if it is divided."""
    if isinstance(parameter, QuantizedWeight):
        return parameter.stored_bytes
    return parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes


def quantized_names(model: nn.Module) -> list[str]:
    """Parameters that are stored in few bits."""
    return [name for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)]
