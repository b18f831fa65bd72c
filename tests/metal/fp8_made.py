"""Checkpoints in FP8, made on the spot from a saved model, with the plain model they stand for beside them."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 448.0
"""Of float8_e4m3fn."""


def save_fp8(source: Path, folder: Path, *, block: tuple[int, int] | str = (8, 8), suffix: str = "_scale_inv") -> Path:
    """Writes `source` with the matrices of its blocks in FP8, and what they then stand for, in float32, into
    folder/dense. `block`: sizes, or "tensor" or "row" for one scale a tensor or an output row."""
    codes: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        codes[name] = dense[name] = value
        if re.search(r"\.layers\.\d+\..*(proj|experts.*)\.weight$", name):
            codes[name], codes[name + suffix], dense[name] = encode(value.float(), block)
    dense_folder = folder / "dense"
    dense_folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (dense_folder / "config.json").write_text(json.dumps(config))
    save_file(dense, dense_folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated(block)}))
    save_file(codes, folder / "model.safetensors", {"format": "pt"})
    for file in source.iterdir():
        for target in (folder, dense_folder):
            if not (target / file.name).exists():
                (target / file.name).write_bytes(file.read_bytes())
    return folder


def stated(block: tuple[int, int] | str) -> dict[str, object]:
    """quantization_config as such checkpoints have it."""
    if isinstance(block, tuple):
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    weights = {"num_bits": 8, "type": "float", "strategy": {"tensor": "tensor", "row": "channel"}[block]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def encode(value_NK: Tensor, block: tuple[int, int] | str) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, what they stand for), written out block by block."""
    outputs, inputs = value_NK.shape
    rows, columns = {"tensor": (outputs, inputs), "row": (1, inputs)}[block] if isinstance(block, str) else block
    codes, dense = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty(outputs, inputs)
    scale = torch.empty(-(-outputs // rows), -(-inputs // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = value_NK[place].abs().max() / LARGEST
            codes[place] = (value_NK[place] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[place] = codes[place].float() * scale[i, j]
    return codes, scale.reshape(1) if block == "tensor" else scale, dense
