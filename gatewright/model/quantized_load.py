"""A base model in few bits, or from FP8: which weights are stored small, and a load that never holds all dense."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from gatewright.model import experts_llama4
from gatewright.model.experts import find_experts, lora_shapes
from gatewright.model.four_bit import bitsandbytes, quantize_nf4
from gatewright.model.quantized import QuantizedWeight, weight_bytes
from gatewright.model.quantized_divided import Shares, divided
from gatewright.model.roles import parameter_roles
from gatewright.model.sources import Shards, StoredFormat
from gatewright.model.stream import Index, Lazy, Weight, weights_of
from gatewright.spec.errors import ModelError

Quantize = Literal["none", "nf4", "fp8"]
Divide = Callable[[PreTrainedModel, Collection[str], Collection[str]], Mapping[str, Shares]]
"""Lays a model on meta out over processes, with DTensors of what each holds its part of.

Told the names of the weights that will be in few bits, and of those whose rows cannot be read alone; of the former,
says who divides the packed bytes.
"""


def load_small(
    folder: Path,
    files: list[str],
    *,
    config: PretrainedConfig,
    quantize: Quantize,
    form: StoredFormat | None,
    dtype: torch.dtype,
    device: torch.device,
    build: dict[str, Any],
    seams: Callable[[PreTrainedModel], PreTrainedModel],
    note: Callable[[str], None],
    divide: Divide | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and transformers' loading report; `note` is told what is stored how, in bytes.

    `form`: how the files hold FP8, None if they do not. `build`: arguments of transformers' loader that choose the
    attention and the code. `seams` puts our experts in place. `divide` lays the model on meta out over processes.
    Raises ModelError, UserError without bitsandbytes.
    """
    refuse(quantize, form, folder)
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype, **build)
    kind = type(empty)
    shares: Mapping[str, Shares] = {}
    weights = weights_of(Shards(folder, files), seams(empty), form)
    packed = _packed(empty, weights, quantize)
    if divide is not None:
        shares = divide(empty, packed, ())
        kind = _divided_class(kind, divide, packed)
    state: dict[str, Lazy] = {}
    for weight in weights:
        state |= _lazies(weight, packed, shares, quantize, dtype, device)
    loaded, report = kind.from_pretrained(
        None,
        config=empty.config,  # of the text model, where the folder's is that of a larger one
        state_dict=state,
        dtype=dtype,
        attn_implementation=build["attn_implementation"],
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    if (folder / "generation_config.json").is_file():
        loaded.generation_config = GenerationConfig.from_pretrained(folder)
    loaded.config._name_or_path = str(folder)
    _tell(note, loaded, weights, quantize, form, dtype, on_ranks=divide is not None)
    return loaded, report


def refuse(quantize: Quantize, form: StoredFormat | None, folder: Path) -> None:
    """Raises what would go wrong, before anything is read."""
    if quantize == "fp8" and (form is None or form.kind != "fp8"):
        raise ModelError(
            f"method.quantize: fp8 keeps the bytes of an FP8 checkpoint, but {folder} holds "
            f"{'plain floats' if form is None else form.method}; set nf4 to store the base in 4 bits, or none, or "
            "point model.path at the model's FP8 release"
        )
    if quantize == "nf4":
        bitsandbytes()


def _divided_class(kind: type[PreTrainedModel], divide: Divide, packed: Collection[str]) -> type[PreTrainedModel]:
    """The class that builds the model, followed by `divide`; packed weights are plain parameters all the same."""

    def build(self: PreTrainedModel, config: PretrainedConfig) -> None:
        kind.__init__(self, config)  # type: ignore[no-untyped-call]
        experts_llama4.adopt(self)  # so that experts are found
        divide(self, packed, ())
        for name in packed:
            path, _, leaf = name.rpartition(".")
            weight = self.get_parameter(name)
            if isinstance(weight, DTensor):
                self.get_submodule(path).register_parameter(leaf, nn.Parameter(weight.to_local(), requires_grad=False))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def quantizable(model: PreTrainedModel) -> set[str]:
    """Names of the weights that may be stored in few bits: linear layers of the decoder's blocks, and expert stacks.

    Not the router, whose near ties 4 bits would decide anew; not norms and biases, which are small; not embedding and
    head, which see every token and are outside the blocks; not a layer with a multiplication of its own.
    """
    roles = parameter_roles(model)
    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and re.search(r"\.\d+\.", name)
        and roles.get(f"{name}.weight") in ("attention", "mlp", "shared_experts")
    }
    experts = set(find_experts(model).values())
    for path, module in model.named_modules():
        if module in experts:
            names |= {f"{path}.{weight}" for weight in lora_shapes(module)}
    return names


def _packed(model: PreTrainedModel, weights: list[Weight], quantize: Quantize) -> set[str]:
    """Names of the weights that are stored in few bits; with fp8, of those that the files hold so."""
    if quantize == "none":
        return set()
    held = {target for weight in weights if quantize == "nf4" or weight.is_fp8 for target in weight.targets}
    return held & quantizable(model)


def _lazies(
    weight: Weight,
    packed: Collection[str],
    shares: Mapping[str, Shares],
    quantize: Quantize,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Lazy]:
    """A promise for each weight that the conversion gives."""
    made: dict[str, Tensor] = {}

    def plain(target: str, index: Index) -> Tensor:
        shape = weight.shape_of(target)
        if weight.comes_by_expert and (index is not ... or weight.stacks_experts or weight.small_bytes):
            rows = range(shape[0]) if index is ... else range(shape[0])[index[0]]
            dense = torch.empty(len(rows), *shape[1:], dtype=dtype)
            for place, matrix in enumerate(weight.matrices(target, dtype, rows)):
                dense[place] = matrix
            return dense
        if target not in made:
            made.update(weight.whole(dtype))
        whole = made.pop(target)
        if index is ...:
            return whole
        weight.agree(whole.shape, shape)
        return whole[index].clone()  # without the rest

    def in_few_bits(target: str) -> QuantizedWeight:
        shape = weight.shape_of(target)

        def pack(rows: range) -> QuantizedWeight:
            if quantize == "fp8":
                return weight.fp8(rows)
            own = torch.Size([len(rows), *shape[1:]]) if len(shape) == 3 else shape
            matrices = weight.matrices(target, torch.float32, rows)
            return quantize_nf4(matrices, shape=own, dtype=dtype, device=device, name=target, first=rows.start)

        rows = weight.rows(target) if len(shape) == 3 else range(1)
        if target not in shares:
            return pack(rows)
        return divided(pack, rows, shares[target], at_once=1 if weight.comes_by_expert else len(rows))

    def promise(target: str) -> Lazy:
        if target in packed:
            return Lazy(lambda _: in_few_bits(target), weight.shape_of(target))
        return Lazy(lambda index: plain(target, index), weight.shape_of(target))

    return {target: promise(target) for target in weight.targets}


def _tell(
    note: Callable[[str], None],
    model: PreTrainedModel,
    weights: list[Weight],
    quantize: Quantize,
    form: StoredFormat | None,
    dtype: torch.dtype,
    *,
    on_ranks: bool,
) -> None:
    plain = str(dtype).removeprefix("torch.")
    where = " on this rank" if on_ranks else ""
    total = weight_bytes(model)
    small = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    if form is not None:
        stored = sum(weight.small_bytes for weight in weights)
        kept = sum(p.numel() for p in small) if quantize == "fp8" else 0
        if stored > kept:
            what = f"made {plain} at load" if quantize != "nf4" else "made NF4 at load"
            kind = "FP8" if form.kind == "fp8" else "MXFP4"
            text = f"{(stored - kept) / 1e9:.3g} GB of the base are {kind} ({form.method}) in its files and were {what}"
            keep = "; method.quantize: fp8 keeps them so" if (quantize, form.kind) == ("none", "fp8") else ""
            note(f"{text}; the base takes {total / 1e9:.3g} GB{where}{keep}")
    if small:
        roles = parameter_roles(model)
        left = Counter(roles[name] for name, p in model.named_parameters() if not isinstance(p, QuantizedWeight))
        held = sum(p.stored_bytes for p in small)
        note(
            f"method.quantize {quantize}: {len(small):,} weights of {sum(p.numel() for p in small) / 1e9:.3g} B "
            f"parameters take {held / 1e9:.3g} GB{where}; the rest takes {(total - held) / 1e9:.3g} GB in {plain} "
            f"({', '.join(sorted(left))})"
        )
