"""The identity of a base model's files, read in milliseconds whatever their size, and the soundness of its weights."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from gatewright.model.quantized import QuantizedWeight
from gatewright.spec.errors import ModelError

SAMPLES = 16
SAMPLE_BYTES = 4096


def base_fingerprint(folder: Path) -> str:
    """sha256 over config.json and, of each weight file, its name, size, and contents at places spread evenly over it.

    The first place is the file's head: names, types and shapes of its tensors. The others tell weights of one shape
    apart, such as two fine-tunes of one model.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header_bytes, size)))
            for sample in range(1, SAMPLES + 1):
                stream.seek(max(0, size * sample // SAMPLES - SAMPLE_BYTES))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def refuse_nan(model: nn.Module, *, source: str) -> None:
    """Raises ModelError for a weight with NaN or infinite values, which no loss would come back from.

    Weights in few bits were looked at when they were packed.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight) or not parameter.is_floating_point():
            continue
        # A finite sum has finite terms; the look at each one, and its memory, is for the rare other case.
        if parameter.detach().sum(dtype=torch.float32).isfinite() or parameter.isfinite().all():
            continue
        bad = int((~parameter.isfinite()).sum())
        raise ModelError(
            f"{source}: {name} holds {bad:,} NaN or infinite values of {parameter.numel():,}; the file is damaged or "
            "was saved from a diverged run: copy it again from the source"
        )
