"""A base in few bits without its values: the packed tensors that the loader would make, on the meta device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from gatewright.model.four_bit import ABSMAX_BLOCK, BLOCK, NF4Weight, quantize_nf4
from gatewright.model.fp8 import Fp8Weight
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.quantized_load import quantizable
from gatewright.model.sources import read_format
from gatewright.spec.errors import RunFileError


def store_nf4(model: PreTrainedModel) -> None:
    """Stores the weights that method.quantize: nf4 stores in 4 bits. Raises UserError without bitsandbytes."""
    with torch.device("cpu"):  # bitsandbytes makes its table of codes once, and a real one
        one = torch.zeros(1, BLOCK)
        quantize_nf4([one], shape=one.shape, dtype=one.dtype, device=one.device, name="none").dense(one.dtype)
    _store(model, empty_nf4)


def store_fp8(model: PreTrainedModel, config: PretrainedConfig, *, source: str) -> None:
    """Stores the weights that an FP8 checkpoint holds so: all that may be, but those its config leaves out by name.

    Raises RunFileError for a config that states no FP8, ModelError for a format that we do not read.
    """
    form = read_format(config, source=source)
    if form is None or form.kind != "fp8":
        raise RunFileError(
            f"rehearsal: method.quantize fp8 keeps the bytes of an FP8 checkpoint, and the config of {source} states "
            "none; point model.path at the model's FP8 release, or set nf4 or none"
        )
    _store(model, lambda shape, dtype: empty_fp8(shape, dtype, form.block), left=_left_out(config))


def _store(
    model: PreTrainedModel, empty: Callable[[torch.Size, torch.dtype], QuantizedWeight], *, left: tuple[str, ...] = ()
) -> None:
    for name in quantizable(model):
        path, _, leaf = name.rpartition(".")
        if any(part == path or path.startswith(f"{part}.") for part in left):
            continue
        module, weight = model.get_submodule(path), model.get_parameter(name)
        module.register_parameter(leaf, nn.Parameter(empty(weight.shape, weight.dtype), requires_grad=False))


def _left_out(config: PretrainedConfig) -> tuple[str, ...]:
    """Paths of modules that quantization_config leaves in 16 bits."""
    values = config.to_dict()
    stated: dict[str, Any] = values.get("quantization_config") or values["text_config"]["quantization_config"]
    return tuple(stated.get("modules_to_not_convert") or stated.get("ignore") or ())


def empty_fp8(shape: torch.Size, dtype: torch.dtype, block: tuple[int, int] | None) -> Fp8Weight:
    """A weight of this shape with one float32 scale a block, or an output row where the format states no block."""
    rows, columns = (min(size, side) for size, side in zip(block or (1, shape[-1]), shape[-2:], strict=True))
    scale = torch.empty(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns), device="meta")
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    return Fp8Weight({"codes": codes, "scale": scale}, shape=shape, dtype=dtype, block=(rows, columns))


def empty_nf4(shape: torch.Size, dtype: torch.dtype) -> NF4Weight:
    """A weight of this shape as quantize_nf4 lays it out."""
    matrix = shape[-2] * shape[-1]
    blocks = shape.numel() // matrix * -(-matrix // BLOCK)
    sizes = {
        "codes": (blocks * BLOCK // 2, torch.uint8),
        "absmax": (blocks, torch.uint8),
        "scale": (-(-blocks // ABSMAX_BLOCK), torch.float32),
    }
    parts = {name: torch.empty(size, dtype=kind, device="meta") for name, (size, kind) in sizes.items()}
    return NF4Weight(parts | {"offset": torch.empty((), device="meta")}, shape=shape, dtype=dtype)
