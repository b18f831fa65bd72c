"""A base model in few bits, or from FP8: which weights are stored small, and a load that never holds all dense."""

import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from gatewright.model.experts import find_experts, lora_shapes
from gatewright.model.four_bit import bitsandbytes, quantize_nf4
from gatewright.model.quantized import QuantizedWeight, weight_bytes
from gatewright.model.roles import parameter_roles
from gatewright.model.sources import Shards, StoredFormat
from gatewright.model.stream import Lazy, Weight, weights_of
from gatewright.spec.errors import ModelError

Quantize = Literal["none", "nf4", "fp8"]


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
    divide: Callable[[PreTrainedModel], None] | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and transformers' loading report; `note` is told what is stored how, in bytes.

    `form`: how the files hold FP8, None if they do not. `build`: arguments of transformers' loader that choose the
    attention and the code. `seams` puts our experts in place. `divide`, shown the model on meta, makes DTensors of the
    expert stacks that are divided over processes: of these, this process reads and holds its own experts, as plain
    parameters. Raises ModelError, UserError without bitsandbytes.
    """
    refuse(quantize, form, folder)
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype, **build)
    kind = type(empty)
    if divide is not None:
        divide(empty)
        _refuse_divided(empty, folder)
        kind = _own_part(kind, divide)
    names = quantizable(seams(empty)) if quantize != "none" else set()
    weights = weights_of(Shards(folder, files), empty, form)
    state: dict[str, Lazy] = {}
    for weight in weights:
        state |= _lazies(weight, names, quantize, dtype, device)
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
    _tell(note, loaded, weights, quantize, form, dtype)
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


def _refuse_divided(model: PreTrainedModel, folder: Path) -> None:
    """Raises ModelError where more than expert stacks is divided."""
    experts = set(find_experts(model).values())
    for module in model.modules():
        if module not in experts and any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            raise ModelError(
                f"{folder}: parallel.dense: zero3 cannot shard a base in few bits, or one from FP8 files; set dense: "
                "zero2, which shards what the adapters train, and parallel.ep to divide the experts"
            )


def _own_part(kind: type[PreTrainedModel], divide: Callable[[PreTrainedModel], None]) -> type[PreTrainedModel]:
    """The class that builds the model with this process's part of what is divided, in plain parameters."""

    def build(self: PreTrainedModel, config: PretrainedConfig) -> None:
        kind.__init__(self, config)  # type: ignore[no-untyped-call]
        divide(self)
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if isinstance(weight, DTensor):
                    module.register_parameter(name, nn.Parameter(weight.to_local(), requires_grad=weight.requires_grad))

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


def _lazies(
    weight: Weight, names: set[str], quantize: Quantize, dtype: torch.dtype, device: torch.device
) -> dict[str, Lazy]:
    """A promise for each weight that the conversion gives."""
    made: dict[str, Tensor] = {}

    def plain(target: str) -> Tensor:
        if weight.comes_by_expert:
            dense = torch.empty(len(weight.rows(target)), *weight.shape[1:], dtype=dtype)
            for index, matrix in enumerate(weight.matrices(target, dtype)):
                dense[index] = matrix
            return dense
        if not made:
            made.update(weight.whole(dtype))
        whole = made.pop(target)
        return whole[list(weight.rows(target))] if weight.is_divided(target) else whole

    def four_bit(target: str) -> Tensor:
        shape, rows = weight.model.get_parameter(target).shape, weight.rows(target)
        own, matrices = torch.Size([len(rows), *shape[1:]]), weight.matrices(target, torch.float32)
        return quantize_nf4(matrices, shape=own, dtype=dtype, device=device, name=target, first=rows.start)

    def promise(target: str) -> Lazy:
        if target not in names or (quantize == "fp8" and not weight.is_fp8):
            return Lazy(lambda: plain(target))
        return Lazy(weight.fp8 if quantize == "fp8" else lambda: four_bit(target))

    return {target: promise(target) for target in weight.targets}


def _tell(
    note: Callable[[str], None],
    model: PreTrainedModel,
    weights: list[Weight],
    quantize: Quantize,
    form: StoredFormat | None,
    dtype: torch.dtype,
) -> None:
    plain = str(dtype).removeprefix("torch.")
    total = weight_bytes(model)
    small = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    if form is not None:
        stored = sum(weight.small_bytes for weight in weights)
        kept = sum(p.parts["codes"].nbytes for p in small) if quantize == "fp8" else 0
        if stored > kept:
            what = f"made {plain} at load" if quantize != "nf4" else "made NF4 at load"
            kind = "FP8" if form.kind == "fp8" else "MXFP4"
            text = f"{(stored - kept) / 1e9:.3g} GB of the base are {kind} ({form.method}) in its files and were {what}"
            keep = "; method.quantize: fp8 keeps them so" if (quantize, form.kind) == ("none", "fp8") else ""
            note(f"{text}; the base takes {total / 1e9:.3g} GB{keep}")
    if small:
        roles = parameter_roles(model)
        left = Counter(roles[name] for name, p in model.named_parameters() if not isinstance(p, QuantizedWeight))
        held = sum(p.stored_bytes for p in small)
        note(
            f"method.quantize {quantize}: {len(small):,} weights of {sum(p.numel() for p in small) / 1e9:.3g} B "
            f"parameters take {held / 1e9:.3g} GB; the rest takes {(total - held) / 1e9:.3g} GB in {plain} "
            f"({', '.join(sorted(left))})"
        )
