"""A base in few bits without its values: the packed tensors that the loader would make, on the meta device."""

from collections.abc import Collection, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from gatewright.model.experts import local
from gatewright.model.four_bit import ABSMAX_BLOCK, BLOCK, NF4Weight, quantize_nf4
from gatewright.model.quantized_divided import Shares, divided


def store_nf4(model: PreTrainedModel, names: Collection[str], shares: Mapping[str, Shares]) -> None:
    """Stores these weights in 4 bits, what of them this rank has. Raises UserError without bitsandbytes."""
    if not names:
        return
    with torch.device("cpu"):  # bitsandbytes makes its table of codes once, and a real one
        one = torch.zeros(1, BLOCK)
        quantize_nf4([one], shape=one.shape, dtype=one.dtype, device=one.device, name="none").dense(one.dtype)
    for name in names:
        path, _, leaf = name.rpartition(".")
        weight = local(model.get_parameter(name))
        stored = empty_nf4(weight.shape, weight.dtype)
        if name in shares:

            def some(rows: range, like: torch.Tensor = weight) -> NF4Weight:
                shape = like.shape if like.dim() == 2 else torch.Size([len(rows), *like.shape[1:]])
                return empty_nf4(shape, like.dtype)

            rows = range(stored.matrices)
            stored = divided(some, rows, shares[name], at_once=len(rows))
        model.get_submodule(path).register_parameter(leaf, nn.Parameter(stored, requires_grad=False))


def empty_nf4(shape: torch.Size, dtype: torch.dtype) -> NF4Weight:
    """A weight of this shape as quantize_nf4 lays it out."""
    matrix = shape[-2] * shape[-1]
    count, blocks = shape.numel() // matrix, -(-matrix // BLOCK)
    sizes = {
        "codes": ((count, blocks * BLOCK // 2), torch.uint8),
        "absmax": ((count, blocks), torch.uint8),
        "scale": ((count, -(-blocks // ABSMAX_BLOCK)), torch.float32),
        "offset": ((count,), torch.float32),
    }
    parts = {name: torch.empty(size, dtype=kind, device="meta") for name, (size, kind) in sizes.items()}
    return NF4Weight(parts, shape=shape, dtype=dtype)
