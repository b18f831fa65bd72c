"""FP8 as checkpoints hold it: 8-bit floats with a scale a block, an output row or a tensor; w = code · scale."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gatewright.model.quantized import QuantizedWeight
from gatewright.spec.errors import ModelError

CODE_TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""safetensors' names of the stored types we read."""
NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""Smallest code without its sign that is no finite number."""
SLAB = 2**24
"""Weights made float32 at one time on the way to the compute type."""


class Fp8Weight(QuantizedWeight):
    """A matrix [N, K] or a stack [E, N, K]: `codes` of that shape, `scale` [(E,) N/rows, K/columns] in float32."""

    def __init__(
        self, parts: dict[str, Tensor], *, shape: torch.Size, dtype: torch.dtype, block: tuple[int, int]
    ) -> None:
        super().__init__(parts, shape=shape, dtype=dtype, block=block)
        self.block = block

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`; the product with the scale is taken in float32."""
        out_ENK = torch.empty(self.shape, dtype=dtype, device=self.device).view(-1, *self.shape[-2:])
        codes_ENK = self.parts["codes"].view(out_ENK.shape)
        scale_ERC = self.parts["scale"].view(len(out_ENK), *self.parts["scale"].shape[-2:])
        rows = self.block[0]
        for experts, begin, end in self._slabs(out_ENK.shape):
            scale = scale_ERC[experts, begin // rows : -(-end // rows)]
            out_ENK[experts, begin:end] = _product(codes_ENK[experts, begin:end], scale, self.block)
        return out_ENK.view(self.shape)

    def refined(self) -> "Fp8Weight":
        """The same weight with blocks that divide its shape, so that scales concatenate as the codes do."""
        (rows, columns), (outputs, inputs) = self.block, self.shape[-2:]
        row, column = math.gcd(rows, outputs), math.gcd(columns, inputs)
        scale = self.parts["scale"].repeat_interleave(rows // row, dim=-2)[..., : outputs // row, :]
        scale = scale.repeat_interleave(columns // column, dim=-1)[..., : inputs // column]
        return Fp8Weight(self.parts | {"scale": scale}, shape=self.shape, dtype=self.dtype, block=(row, column))

    def _slabs(self, shape: torch.Size) -> Iterator[tuple[slice, int, int]]:
        """Whole experts together, or whole rows of blocks of one."""
        experts, outputs, inputs = shape
        together = max(1, SLAB // (outputs * inputs))
        rows = outputs if together > 1 else max(1, SLAB // (inputs * self.block[0])) * self.block[0]
        for first in range(0, experts, together):
            for begin in range(0, outputs, rows):
                yield slice(first, first + together), begin, min(outputs, begin + rows)


def _product(codes_ENK: Tensor, scale_ERC: Tensor, block: tuple[int, int]) -> Tensor:
    values_ENK = codes_ENK.float()
    experts, outputs, inputs = values_ENK.shape
    rows, columns = block
    if outputs % rows == 0 and inputs % columns == 0:
        blocks = values_ENK.view(experts, outputs // rows, rows, inputs // columns, columns)
        return blocks.mul_(scale_ERC[:, :, None, :, None]).view(values_ENK.shape)
    scale = scale_ERC.repeat_interleave(rows, dim=1)[:, :outputs].repeat_interleave(columns, dim=2)[..., :inputs]
    return values_ENK.mul_(scale)


def fp8_weight(codes: Tensor, scale: Tensor, *, block: tuple[int, int] | None, name: str) -> Fp8Weight:
    """A weight as the file holds it; `block` as config.json states it, None where the scale's own shape tells.

    Raises ModelError for a scale that does not fit, or is no finite number.
    """
    *experts, outputs, inputs = codes.shape
    scale = scale.float()
    if _holds_nan(codes):
        raise ModelError(f"{name}: holds NaN or infinite weights; copy the file again from the source")
    if not scale.isfinite().all():
        raise ModelError(f"{name}: its FP8 scale holds NaN or infinity; copy the file again from the source")
    if block and scale.shape == (*experts, -(-outputs // block[0]), -(-inputs // block[1])):
        block = (min(block[0], outputs), min(block[1], inputs))
    elif scale.numel() == math.prod(experts):
        scale, block = scale.reshape(*experts, 1, 1), (outputs, inputs)
    elif scale.numel() == math.prod(experts) * outputs:
        scale, block = scale.reshape(*experts, outputs, 1), (1, inputs)
    else:
        raise ModelError(
            f"{name}: an FP8 weight of shape {tuple(codes.shape)} with a scale of shape {tuple(scale.shape)}; wanted "
            f"one a {f'{block[0]} × {block[1]} block' if block else 'tensor or an output row'}"
        )
    return Fp8Weight({"codes": codes, "scale": scale}, shape=codes.shape, dtype=torch.bfloat16, block=block)


def _holds_nan(codes: Tensor) -> bool:
    return bool(((codes.view(torch.uint8) & 0x7F) >= NOT_FINITE[codes.dtype]).any())
