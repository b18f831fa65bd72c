"""A Hugging Face folder as a GGUF file, tensor by tensor: what is in memory is one matrix in float32.

The file is laid out first, from the shapes in the safetensors' headers, then filled. It is written under another name
and renamed when it is whole and on disk. Tensors come out as llama.cpp's own converter writes them, to the byte.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors import SafetensorError
from torch import Tensor

from gatewright.export.families import Config, read_config
from gatewright.export.shards import PARTIAL
from gatewright.export.vocabulary import Vocabulary, read_vocabulary
from gatewright.model.load import check_weights
from gatewright.model.sources import Shards
from gatewright.spec.errors import ModelError

Precision = Literal["f32", "f16", "bf16"]
STORED = {
    "f32": (GGMLQuantizationType.F32, torch.float32, 0),
    "f16": (GGMLQuantizationType.F16, torch.float16, 1),
    "bf16": (GGMLQuantizationType.BF16, torch.bfloat16, 32),
}
"""Type in the file, in torch, and general.file_type."""
ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", ".bias")
EXPERT = re.compile(r"model\.layers\.(\d+)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
FUSED = re.compile(r"(model\.layers\.\d+\.\w+\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the GGUF file."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[Tensor]]
    """The tensor in pieces along its first axis, in whatever float type they are stored."""
    whole_f32: bool

    def stored(self, precision: Precision) -> tuple[GGMLQuantizationType, torch.dtype]:
        kind, dtype, _ = STORED["f32" if self.whole_f32 else precision]
        return kind, dtype


def convert(
    folder: Path,
    out: Path,
    *,
    precision: Precision,
    name: str,
    tick: Callable[[int, int], None],
    chat_template: str | None = None,
) -> int:
    """Writes the model in `folder` to the file `out`; returns its bytes. `tick(done, total)` is told of bytes.

    `chat_template` replaces the tokenizer's own.

    Raises ModelError, before anything is written, for a model or tokenizer that GGUF cannot represent, and for
    weights that are missing or damaged; OSError when the disk refuses.
    """
    config = read_config(folder)
    vocabulary = read_vocabulary(folder, size=int(config.values["vocab_size"]), chat_template=chat_template)
    shards = open_shards(folder)
    outputs = list(plan_outputs(config, shards))
    partial = out.with_name(out.name + PARTIAL)
    writer = GGUFWriter(partial, config.family.architecture)
    _describe(writer, config, vocabulary, name=name, precision=precision)
    writer.add_size_label(_size_label(outputs))
    write_outputs(writer, outputs, precision, tick)
    os.replace(partial, out)
    return out.stat().st_size


def open_shards(folder: Path) -> Shards:
    """The folder's tensors. Raises ModelError for files that are missing, cut off or damaged."""
    return Shards(folder, check_weights(folder))


def write_outputs(
    writer: GGUFWriter, outputs: list[Output], precision: Precision, tick: Callable[[int, int], None]
) -> None:
    """Writes a file whose fields are set: layout, then data, then fsync. What cannot be finished is removed."""
    try:
        _write(writer, outputs, precision, tick)
    except BaseException:
        for file in writer.fout or []:
            with contextlib.suppress(OSError):  # what is still in its buffer finds no room either
                file.close()
        if writer.path is not None:
            writer.path.unlink(missing_ok=True)
        raise


def _write(writer: GGUFWriter, outputs: list[Output], precision: Precision, tick: Callable[[int, int], None]) -> None:
    sizes = []
    for output in outputs:
        kind, dtype = output.stored(precision)
        sizes.append(math.prod(output.shape) * dtype.itemsize)
        # gguf takes its shapes from numpy's types, which have no bfloat16; the raw type overrules.
        writer.add_tensor_info(output.name, output.shape, np.dtype(np.float16), sizes[-1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    [file] = writer.fout
    done, total = 0, sum(sizes)
    for output, size in zip(outputs, sizes, strict=True):
        writer.write_padding(file, file.tell())
        _, dtype = output.stored(precision)
        written = 0
        for piece in output.read():
            # numpy knows no bfloat16: the bytes go out as they are.
            data = (
                (piece if piece.dtype == dtype else piece.float().to(dtype))
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
            )
            file.write(data.data)
            written += data.nbytes
            tick(done + written, total)
        assert written == size, (output.name, written, size)
        writer.write_padding(file, size)
        done += size
    writer.flush()
    os.fsync(file.fileno())
    writer.close()


def plan_outputs(config: Config, shards: Shards) -> Iterator[Output]:
    """Every tensor of the file, in the order of the folder's. Raises ModelError for one that has no name in GGUF."""
    names = gguf.get_tensor_name_map(_architecture(config), config.layers)
    if config.rope["rope_type"] == "llama3":
        factors = _llama3_factors(config)
        yield Output("rope_freqs.weight", tuple(factors.shape), lambda: iter([factors]), True)
    stacked: set[tuple[str, str]] = set()
    for key in shards.place:
        expert, fused = EXPERT.fullmatch(key), FUSED.fullmatch(key)
        if key == "lm_head.weight" and config.tied:
            continue  # a copy of the embedding, which llama.cpp uses for both
        if expert:
            layer, block, _, part = expert.groups()
            if (layer, part) not in stacked:
                stacked.add((layer, part))
                yield _stack(config, shards, names, f"model.layers.{layer}.{block}.experts", part)
        elif fused:
            yield from _fused(shards, names, fused[1], fused[2])
        else:
            yield _single(config, shards, names, key)


def gguf_name(names: gguf.TensorNameMap, key: str, *, folder: Path) -> str:
    """GGUF's name of a tensor. Raises ModelError for one that the architecture does not have there."""
    found = names.get_name(key, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ModelError(f"{folder}: {key} has no place in a GGUF file of this architecture; no file is written")
    return str(found)


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from rotary halves to rotary pairs: [heads·dim, …], the same shape."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def rotary_heads(config: Config, key: str) -> int | None:
    """Heads of a projection whose rows llama.cpp wants interleaved; None for every other tensor."""
    if not config.family.interleaves_rope:
        return None
    if re.search(r"self_attn\.q_proj\b", key):
        return config.heads
    return config.kv_heads if re.search(r"self_attn\.k_proj\b", key) else None


def _single(config: Config, shards: Shards, names: gguf.TensorNameMap, key: str) -> Output:
    name, shape = gguf_name(names, key, folder=shards.folder), tuple(shards.shape(key))
    heads = rotary_heads(config, key)

    def read() -> Iterator[Tensor]:
        value = _read(shards, key)
        yield value if heads is None else interleave(value, heads)

    return Output(name, shape, read, len(shape) == 1 or name.endswith(ALWAYS_F32))


def _stack(config: Config, shards: Shards, names: gguf.TensorNameMap, prefix: str, part: str) -> Output:
    keys = [f"{prefix}.{expert}.{part}.weight" for expert in range(config.experts)]
    if missing := [key for key in keys if key not in shards.place]:
        raise ModelError(f"{shards.folder}: {missing[0]} is missing, though config.json says {config.experts} experts")
    name = gguf_name(names, f"{prefix}.{part}.weight", folder=shards.folder)
    shape = (config.experts, *shards.shape(keys[0]))
    return Output(name, shape, lambda: (_read(shards, key) for key in keys), False)


def _fused(shards: Shards, names: gguf.TensorNameMap, prefix: str, part: str) -> Iterator[Output]:
    """Stacks as transformers holds them in memory: [E, 2·I, H] and [E, H, I]."""
    key = f"{prefix}.{part}"
    experts, rows, columns = shards.shape(key)
    halves = {"gate_proj": 0, "up_proj": rows // 2} if part == "gate_up_proj" else {"down_proj": 0}
    length = rows // len(halves)
    for half, start in halves.items():

        def read(start: int = start) -> Iterator[Tensor]:
            return (_read(shards, key, expert)[start : start + length] for expert in range(experts))

        name = gguf_name(names, f"{prefix}.{half}.weight", folder=shards.folder)
        yield Output(name, (experts, length, columns), read, False)


def _read(shards: Shards, key: str, row: int | None = None) -> Tensor:
    try:
        return shards.read(key, row)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{shards.folder}: {key} cannot be read ({error}); copy the file again") from None


def _architecture(config: Config) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.family.architecture)


def _describe(writer: GGUFWriter, config: Config, vocabulary: Vocabulary, *, name: str, precision: Precision) -> None:
    """Sets the fields of the file."""
    values, rope = config.values, config.rope
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(config.layers)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    if values.get("head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.family.architecture == "llama":
        writer.add_vocab_size(values["vocab_size"])
        writer.add_rope_dimension_count(config.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.experts:
        writer.add_expert_count(config.experts)
        writer.add_expert_used_count(values["num_experts_per_tok"])
        if "moe_intermediate_size" in values:
            writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
        if values.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(values["shared_expert_intermediate_size"])
    writer.add_file_type(STORED[precision][2])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary.write(writer)


def _size_label(outputs: list[Output]) -> str:
    """Such as 1.1B or 8x7.0B: what people call the model's size (general.size_label)."""
    stacks = [output.shape for output in outputs if "_exps." in output.name]
    experts = stacks[0][0] if stacks else 0
    in_experts = sum(math.prod(shape) for shape in stacks)
    total = sum(math.prod(output.shape) for output in outputs)
    return gguf.size_label(total, total - in_experts, in_experts // max(experts, 1), experts)


def _llama3_factors(config: Config) -> Tensor:
    """[head_dim / 2]: what each rotary frequency is divided by (Llama 3.1's scaling of rotary embeddings)."""
    rope = config.rope
    wave_D = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    smooth_D = ((old / wave_D - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth_D) / factor + smooth_D)
