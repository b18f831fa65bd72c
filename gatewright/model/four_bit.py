"""NF4: 4-bit codes with double quantisation, made and read by bitsandbytes' functional API on any of its devices.

Layout of QLoRA (Dettmers et al. 2023, arXiv:2305.14314): blocks of 64 weights share an absmax; the absmaxes, less
their mean, are held in 8 bits, in blocks of 256 with one float32 scale. 0.5 + 1/64 + 4/(64·256) bytes a weight. Every
matrix of a stack is packed by itself, with a mean of its own, so that an expert is the same whoever its neighbours are.
"""

import functools
import importlib
from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from gatewright.model.quantized import QuantizedWeight
from gatewright.spec.errors import ModelError, UserError

BLOCK = 64
ABSMAX_BLOCK = 256
PIECE = 2**20
"""Weights quantised by one call, a multiple of BLOCK: bounds the temporaries of bitsandbytes' plain version."""


class NF4Weight(QuantizedWeight):
    """A matrix [N, K], or a stack of them [E, N, K], each matrix padded with zeros to whole blocks."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`."""
        bnb = bitsandbytes()
        absmax8 = self.parts["absmax"]
        blocks = absmax8.shape[-1]
        absmax = bnb.dequantize_blockwise(
            F.pad(absmax8, (0, -blocks % ABSMAX_BLOCK)).view(-1),
            absmax=self.parts["scale"].view(-1),
            code=_absmax_code(self.device),
            blocksize=ABSMAX_BLOCK,
        )
        absmax = absmax.view(len(absmax8), -1)[:, :blocks] + self.parts["offset"][:, None]
        codes = self.parts["codes"].view(-1)
        state = bnb.QuantState(
            absmax=absmax.view(-1), shape=(1, 2 * codes.numel()), dtype=dtype, blocksize=BLOCK, quant_type="nf4"
        )
        flat = bnb.dequantize_4bit(codes[:, None], state).view(-1)
        matrix = self.shape[-2] * self.shape[-1]
        return flat.view(-1, matrix + -matrix % BLOCK)[:, :matrix].reshape(self.shape)


def quantize_nf4(
    matrices: Iterable[Tensor],
    *,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    first: int = 0,
) -> NF4Weight:
    """The weight of this shape from its matrices, one at a time and each dropped at once.

    `first`: number of the first, where they are some of a stack's experts.
    Deterministic on one kind of device. Raises ModelError for NaN or infinite weights, naming them.
    """
    bnb = bitsandbytes()
    matrix = shape[-2] * shape[-1]
    padded = matrix + -matrix % BLOCK
    count = shape.numel() // matrix
    codes = torch.empty(count, padded // 2, dtype=torch.uint8, device=device)
    absmax = torch.empty(count, padded // BLOCK, dtype=torch.float32, device=device)
    for index, dense in enumerate(matrices):
        flat = dense.reshape(-1)
        for start in range(0, padded, PIECE):
            piece = flat[start : start + PIECE].to(device)
            if not piece.isfinite().all():
                where = name if count == 1 else f"{name}, expert {first + index}"
                raise ModelError(
                    f"{where}: holds NaN or infinite weights, which no 4-bit code can say; repair the file"
                )
            piece = F.pad(piece, (0, -len(piece) % BLOCK))
            packed, state = bnb.quantize_4bit(piece, blocksize=BLOCK, quant_type="nf4")
            codes[index, start // 2 :][: packed.numel()] = packed.view(-1)
            absmax[index, start // BLOCK :][: state.absmax.numel()] = state.absmax
    offset = torch.stack([row.mean() for row in absmax])
    blocks = absmax.shape[1]
    filled = F.pad(absmax - offset[:, None], (0, -blocks % ABSMAX_BLOCK))
    absmax8, state = bnb.quantize_blockwise(filled.view(-1), code=_absmax_code(device), blocksize=ABSMAX_BLOCK)
    absmax8 = absmax8.view(filled.shape)[:, :blocks].contiguous()
    parts = {"codes": codes, "absmax": absmax8, "scale": state.absmax.view(count, -1), "offset": offset}
    return NF4Weight(parts, shape=shape, dtype=dtype)


@functools.cache
def bitsandbytes() -> ModuleType:
    """bitsandbytes' functional API. Raises UserError where it is not installed."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise UserError(
            f'method.quantize: nf4 needs bitsandbytes ({error}); pip install "gatewright[quantize]"'
        ) from None


@functools.cache
def _absmax_code(device: torch.device) -> Tensor:
    """bitsandbytes' 256 values for absmaxes, one copy a device."""
    code: Tensor = bitsandbytes().create_dynamic_map().to(device)
    return code
