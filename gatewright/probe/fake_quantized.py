"""A base in few bits without its values: the packed tensors that the loader would make, on the meta device."""

import torch
from torch import nn
from transformers import PreTrainedModel

from gatewright.model.four_bit import ABSMAX_BLOCK, BLOCK, NF4Weight, quantize_nf4
from gatewright.model.quantized_load import quantizable


def store_nf4(model: PreTrainedModel) -> None:
    """Stores the weights that method.quantize: nf4 stores in 4 bits. Raises UserError without bitsandbytes."""
    with torch.device("cpu"):  # bitsandbytes makes its table of codes once, and a real one
        one = torch.zeros(1, BLOCK)
        quantize_nf4([one], shape=one.shape, dtype=one.dtype, device=one.device, name="none").dense(one.dtype)
    for name in quantizable(model):
        path, _, leaf = name.rpartition(".")
        module, weight = model.get_submodule(path), model.get_parameter(name)
        module.register_parameter(leaf, nn.Parameter(empty_nf4(weight.shape, weight.dtype), requires_grad=False))


def empty_nf4(shape: torch.Size, dtype: torch.dtype) -> NF4Weight:
    """A weight of this shape as quantize_nf4 lays it out."""
    matrix = shape[-2] * shape[-1]
    count, blocks = shape.numel() // matrix, -(-matrix // BLOCK)
    sizes = {
        "codes": ((count * blocks * BLOCK // 2,), torch.uint8),
        "absmax": ((count, blocks), torch.uint8),
        "scale": ((count * -(-blocks // ABSMAX_BLOCK),), torch.float32),
        "offset": ((count,), torch.float32),
    }
    parts = {name: torch.empty(size, dtype=kind, device="meta") for name, (size, kind) in sizes.items()}
    return NF4Weight(parts, shape=shape, dtype=dtype)
