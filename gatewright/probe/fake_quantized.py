"""A base in few bits without its values: the packed tensors that the loader would make, on the meta device."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from gatewright.model.experts import local
from gatewright.model.four_bit import ABSMAX_BLOCK, BLOCK, NF4Weight, quantize_nf4
from gatewright.model.fp8 import Fp8Weight
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.quantized_divided import Shares, divided
from gatewright.model.quantized_load import Quantize, quantizable
from gatewright.model.sources import read_format
from gatewright.spec.errors import RunFileError

Empty = Callable[[torch.Size, torch.dtype], QuantizedWeight]
"""A weight of this shape and compute type, in a format."""


def few_bits(
    model: PreTrainedModel, config: PretrainedConfig, quantize: Quantize, *, source: str
) -> tuple[set[str], Empty]:
    """Names of the weights that the loader keeps in few bits, and their format.

    FP8: all that may be, but those that the config leaves out by name; it says what the files hold.
    Raises RunFileError for a config that states no FP8, ModelError for a format that we do not read, UserError
    without bitsandbytes.
    """
    if quantize == "none":
        return set(), empty_nf4
    names = quantizable(model)
    if quantize == "nf4":
        with torch.device("cpu"):  # bitsandbytes makes its table of codes once, and a real one
            one = torch.zeros(1, BLOCK)
            quantize_nf4([one], shape=one.shape, dtype=one.dtype, device=one.device, name="none").dense(one.dtype)
        return names, empty_nf4
    form = read_format(config, source=source)
    if form is None or form.kind != "fp8":
        raise RunFileError(
            f"rehearsal: method.quantize fp8 keeps the bytes of an FP8 checkpoint, and the config of {source} states "
            "none; point model.path at the model's FP8 release, or set nf4 or none"
        )
    left = _left_out(config)
    return {name for name in names if not name.startswith(left)}, partial(empty_fp8, block=form.block)


def store(model: PreTrainedModel, names: Collection[str], empty: Empty, shares: Mapping[str, Shares]) -> None:
    """Puts weights of the format in place of these, of each what this rank has."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        weight = local(model.get_parameter(name))
        stored = empty(weight.shape, weight.dtype)
        if name in shares:

            def some(rows: range, like: torch.Tensor = weight) -> QuantizedWeight:
                shape = like.shape if like.dim() == 2 else torch.Size([len(rows), *like.shape[1:]])
                return empty(shape, like.dtype)

            rows = range(stored.matrices)
            stored = divided(some, rows, shares[name], at_once=len(rows))
        model.get_submodule(path).register_parameter(leaf, nn.Parameter(stored, requires_grad=False))


def _left_out(config: PretrainedConfig) -> tuple[str, ...]:
    """Beginnings of the names that quantization_config leaves in 16 bits."""
    values = config.to_dict()
    stated: dict[str, Any] = values.get("quantization_config") or values["text_config"]["quantization_config"]
    return tuple(f"{path}." for path in stated.get("modules_to_not_convert") or stated.get("ignore") or ())


def empty_fp8(shape: torch.Size, dtype: torch.dtype, *, block: tuple[int, int] | None) -> Fp8Weight:
    """A weight of this shape with one float32 scale a block, or an output row where the format states no block."""
    rows, columns = (min(size, side) for size, side in zip(block or (1, shape[-1]), shape[-2:], strict=True))
    scale = torch.empty(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns), device="meta")
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    return Fp8Weight({"codes": codes, "scale": scale}, shape=shape, dtype=dtype, block=(rows, columns))


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
