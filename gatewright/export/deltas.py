"""An adapter folder of PEFT's as what it adds to each weight of its base model: read once, and checked as a whole.

Understood: LoRA on linear layers, embeddings, and parameters (`target_parameters`, fused experts among them), rsLoRA,
DoRA on linear layers, rank and alpha patterns, and whole weights in `modules_to_save`. All else is refused by name.

Shapes: E experts, r rank; a delta has the shape of the weight it is added to.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from gatewright.model.base_files import base_fingerprint
from gatewright.spec.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
NOTES = "gatewright.json"
PREFIX = "base_model.model."
FUSED_SINCE = (0, 19, 1)
"""PEFT before this wrote fused experts with inputs and outputs the other way round, in files of the same shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """W + scale · B·A; with a magnitude m (DoRA), its rows scaled to length m."""

    a: Tensor
    """[r, in], or [E, r, in]."""
    b: Tensor
    """[out, r], or [E, out, r]."""
    scale: float
    transposed: bool
    """Whether the weight has its inputs first: embeddings, and experts such as those of gpt-oss."""
    magnitude: Tensor | None = None

    def delta(self, expert: int | None = None) -> Tensor:
        """scale · B·A in float32 and the weight's own orientation: all of it, or one expert's."""
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        product = (b.float() @ a.float()) * self.scale
        return product.transpose(-2, -1) if self.transposed else product


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """What an adapter does to its base model, by the architecture's names of weights."""

    folder: Path
    base: str
    """Where its config says the base model lies."""
    low_rank: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]
    """Weights that were trained whole."""
    tied: Mapping[str, str]
    """Embedding and head of a base that shares one weight between them, each with the other's name."""
    config: Mapping[str, Any] = field(repr=False)

    @property
    def unties(self) -> bool:
        """Whether it brings an embedding or a head of its own to a base that ties the two: now they are two weights."""
        return any(name in self.tied for name in self.replaced)


def read_config(folder: Path) -> Mapping[str, Any]:
    """adapter_config.json. Raises ModelError for a folder that is no LoRA adapter, or has what we cannot merge."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {CONFIG}, so this is not an adapter folder") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}); copy it again") from None
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type {kind!r}; only LORA is merged here: merge it with PEFT first")
    for key, harmless in _HARMLESS.items():
        if config.get(key, harmless) not in (harmless, None, [], {}):
            raise ModelError(f"{file}: {key} = {config[key]!r} is not merged here; merge it with PEFT first")
    if config.get("target_parameters") and _version(config.get("peft_version")) < FUSED_SINCE:
        raise ModelError(
            f"{file}: target_parameters, written by PEFT {config.get('peft_version') or 'of no named version'}. Before "
            "0.19.1 such weights had another layout in the same shape, and merging would scramble the experts in "
            "silence; load it with that version and save it with a newer one"
        )
    return dict(config)


_HARMLESS: dict[str, Any] = {
    "bias": "none", "lora_bias": False, "fan_in_fan_out": False, "layer_replication": None, "use_qalora": False,
    "trainable_token_indices": None, "alora_invocation_tokens": None, "megatron_config": None, "use_bdlora": None,
    "arrow_config": None,
}  # fmt: skip
"""Settings that change what an adapter means, each with the value that does not."""


def read_adapter(folder: Path, model: PreTrainedModel, *, base: Path) -> AdapterFiles:
    """Reads and checks the folder against the architecture (`model`, on the meta device) and the base model's files.

    Raises ModelError for a damaged file, another base model, tensors that fit no weight, LoRA on one of two tied
    weights, and NaN or infinite values.
    """
    config = read_config(folder)
    file = folder / WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: {error}; the file is missing or damaged: copy it again") from None
    _refuse_other_base(folder, base)
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ModelError(f"{file}: {key.removeprefix(PREFIX)} holds NaN or infinite values; the adapter is broken")
    reading = _Reading(file, config, model, tensors)
    reading.take_all()
    found = AdapterFiles(
        folder=folder,
        base=str(config.get("base_model_name_or_path") or ""),
        low_rank=reading.low_rank,
        replaced=reading.replaced,
        tied=reading.tied,
        config=config,
    )
    if not (found.low_rank or found.replaced):
        raise ModelError(f"{file}: holds no tensor to merge")
    return found


class _Reading:
    """Takes the file's tensors one by one; what is left over at the end fits nothing."""

    def __init__(
        self, file: Path, config: Mapping[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]
    ) -> None:
        self.file, self.config, self.model, self.tensors = file, config, model, tensors
        self.low_rank: dict[str, LowRank] = {}
        self.replaced: dict[str, Tensor] = {}
        self.shapes = {name: p.shape for name, p in [*model.named_parameters(), *model.named_buffers()]}
        self.tied = _tied_weights(model)

    def take_all(self) -> None:
        for key in sorted(self.tensors):
            if key.endswith(".lora_A.weight"):
                self._pair(key.removesuffix(".lora_A.weight"), "lora_A.weight", "lora_B.weight")
            elif key.endswith(".lora_embedding_A"):
                self._pair(key.removesuffix(".lora_embedding_A"), "lora_embedding_A", "lora_embedding_B")
        for key, tensor in self.tensors.items():
            if ".lora_" not in key and not key.endswith(".base_layer.weight"):
                self._replace(key, tensor)

    def _pair(self, prefix: str, part_a: str, part_b: str) -> None:
        a, b = self.tensors[f"{prefix}.{part_a}"], self.tensors.get(f"{prefix}.{part_b}")
        if b is None:
            raise ModelError(
                f"{self.file}: {prefix.removeprefix(PREFIX)} has a lora_A but no lora_B; the file is damaged"
            )
        path = prefix.removeprefix(PREFIX)
        bare = re.sub(r"(\.base_layer)+$", "", path)
        depth = (len(path) - len(bare)) // len(".base_layer")
        name, stacked, transposed = self._weight_of(bare, depth, embedding=part_a == "lora_embedding_A")
        if name in self.tied:
            raise ModelError(
                f"{self.file}: LoRA on {name}, which this model ties to {self.tied[name]}: PEFT trains one of the two "
                "and merging changes both, so the merged model would not be the trained one. Train it whole "
                "(method.adapter.full, PEFT's modules_to_save) or not at all"
            )
        shape = self.shapes[name]
        if stacked:
            count = shape[0]
            if a.shape[0] % count or b.shape[1] != a.shape[0]:
                self._misfit(name, a, b, shape)
            a, b = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count)).permute(2, 0, 1)
        outputs, inputs = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
        if a.shape[-1] != inputs or b.shape[-2] != outputs or a.shape[-2] != b.shape[-1]:
            self._misfit(name, a, b, shape)
        magnitude = self.tensors.get(f"{prefix}.lora_magnitude_vector") if self.config.get("use_dora") else None
        if self.config.get("use_dora") and (magnitude is None or stacked or transposed):
            raise ModelError(f"{self.file}: DoRA on {name} is not merged here; merge it with PEFT first")
        scale = self._scale(bare, rank=a.shape[-2])
        self.low_rank[name] = LowRank(a=a, b=b, scale=scale, transposed=transposed, magnitude=magnitude)

    def _weight_of(self, path: str, depth: int, *, embedding: bool) -> tuple[str, bool, bool]:
        """Name of the weight that a pair at this path and nesting belongs to, whether it is a stack, and transposed."""
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            raise ModelError(
                f"{self.file}: adapts {path}, which {type(self.model).__name__} does not have; this adapter was made "
                "for another architecture"
            ) from None
        own = [name for name, _ in module.named_parameters(recurse=False)]
        stacks = [name for name in own if len(self.shapes[f"{path}.{name}"]) == 3]
        if isinstance(module, nn.Linear | nn.Embedding) or not stacks:
            return f"{path}.weight", False, embedding
        patterns = self.config.get("target_parameters") or []
        targeted = [n for n in stacks if any(f".{path}.{n}".endswith(f".{pattern}") for pattern in patterns)]
        if depth >= len(targeted):
            raise ModelError(
                f"{self.file}: {path} holds more adapters than target_parameters names; the folder is damaged"
            )
        transposed = bool(vars(module).get("is_transposed"))
        return f"{path}.{targeted[len(targeted) - 1 - depth]}", True, transposed

    def _replace(self, key: str, tensor: Tensor) -> None:
        name = key.removeprefix(PREFIX)
        if name not in self.shapes:
            raise ModelError(
                f"{self.file}: {name} is no weight of {type(self.model).__name__}; it was made for another model"
            )
        if self.shapes[name] != tensor.shape:
            raise ModelError(
                f"{self.file}: {name} has shape {tuple(tensor.shape)}, the base model's {tuple(self.shapes[name])}; it "
                "was made for another model"
            )
        self.replaced[name] = tensor

    def _scale(self, path: str, *, rank: int) -> float:
        alpha = _by_pattern(self.config.get("alpha_pattern") or {}, path, self.config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _misfit(self, name: str, a: Tensor, b: Tensor, shape: torch.Size) -> None:
        raise ModelError(
            f"{self.file}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit {name} of shape {tuple(shape)}; the "
            "adapter was made for another model"
        )


def _by_pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches a whole ending of the path, cut at a dot."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path)), default)


def _tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """Embedding -> head and head -> embedding where the model shares one weight between them."""
    if not model.config.get_text_config().tie_word_embeddings:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module in (embedding, head)]
    pair = [f"{name}.weight" for name in names]
    return {pair[0]: pair[-1], pair[-1]: pair[0]} if len(pair) == 2 else {}


def _refuse_other_base(folder: Path, base: Path) -> None:
    notes = folder / NOTES
    if not notes.is_file():
        return
    trained_on = json.loads(notes.read_text(encoding="utf-8")).get("base")
    if trained_on and trained_on != base_fingerprint(base):
        raise ModelError(
            f"{folder}: was trained on another base model than {base} (their files differ); name the right one with "
            "--base"
        )


def _version(text: object) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text or ""))
    return tuple(int(part or 0) for part in numbers.groups()) if numbers else (0,)
