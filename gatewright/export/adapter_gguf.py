"""An adapter as a GGUF file that llama.cpp puts on a base model when it loads it: linear layers and stacks of experts.

llama.cpp scales each pair by alpha over its rank; where PEFT's scale is another (rsLoRA, patterns), B is multiplied by
the rest. Experts go out as [E, r, in] and [E, out, r]; the two halves of gate_up_proj share their A.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import torch
from gguf import GGUFWriter
from torch import Tensor

from gatewright.export.convert import Output, gguf_name, interleave, rotary_heads, write_outputs
from gatewright.export.deltas import AdapterFiles, LowRank
from gatewright.export.families import Config, read_config
from gatewright.export.shards import PARTIAL
from gatewright.spec.errors import ModelError


def write_adapter(adapter: AdapterFiles, base: Path, out: Path, *, name: str, tick: Callable[[int, int], None]) -> int:
    """Writes the file whole, or not at all; returns its bytes.

    Raises ModelError for what an adapter in GGUF cannot say: weights trained whole, DoRA, adapted embeddings.
    """
    config = read_config(base)
    if adapter.replaced:
        raise ModelError(
            f"{adapter.folder}: {next(iter(adapter.replaced))} was trained whole (modules_to_save), which a GGUF "
            "adapter cannot hold; export --to gguf instead"
        )
    alpha = float(adapter.config["lora_alpha"])
    outputs = [output for key, low in adapter.low_rank.items() for output in _pairs(config, adapter, key, low, alpha)]
    partial = out.with_name(out.name + PARTIAL)
    writer = GGUFWriter(partial, config.family.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    write_outputs(writer, outputs, "f32", tick)
    os.replace(partial, out)
    return out.stat().st_size


def _pairs(config: Config, adapter: AdapterFiles, key: str, low: LowRank, alpha: float) -> Iterator[Output]:
    if low.magnitude is not None:
        raise ModelError(f"{adapter.folder}: DoRA on {key} has no place in a GGUF adapter; export --to gguf instead")
    if low.transposed:
        raise ModelError(
            f"{adapter.folder}: {key} is adapted as an embedding, or in another orientation, which a GGUF adapter "
            "cannot hold; export --to gguf instead"
        )
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.family.architecture)
    names = gguf.get_tensor_name_map(kind, config.layers)
    a, b = low.a.float(), low.b.float() * (low.scale * low.a.shape[-2] / alpha)
    if low.a.dim() == 2:
        heads = rotary_heads(config, key)
        yield from _pair(gguf_name(names, key, folder=adapter.folder), a, b if heads is None else interleave(b, heads))
        return
    prefix, _, part = key.rpartition(".")
    if part == "gate_up_proj":
        gate, up = b.chunk(2, dim=1)
        halves = {"gate_proj": gate, "up_proj": up}
    else:
        halves = {part: b}
    for half, factor in halves.items():
        yield from _pair(gguf_name(names, f"{prefix}.{half}.weight", folder=adapter.folder), a, factor)


def _pair(name: str, a: Tensor, b: Tensor) -> Iterator[Output]:
    for suffix, tensor in (("lora_a", a), ("lora_b", b)):
        yield Output(f"{name}.{suffix}", tuple(tensor.shape), _once(tensor), True)


def _once(tensor: Tensor) -> Callable[[], Iterator[Tensor]]:
    return lambda: iter([tensor.to(torch.float32)])
