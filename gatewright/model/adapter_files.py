"""An adapter as files: PEFT's own format, and beside it what PEFT's config cannot say. Written, read, compared.

adapter_model.safetensors   float32; an expert without a pair is zero, so that stock PEFT loads the folder
adapter_config.json         PEFT's config
gatewright.json             fingerprint of the base model, dropout in training, adapted experts, digest
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from gatewright.model.adapter_config import peft_config
from gatewright.model.adapters import ADAPTER, MatrixLora, Rounded, full_modules
from gatewright.model.base_files import base_fingerprint
from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.spec import run as spec
from gatewright.spec.errors import CheckpointError, ModelError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
NOTES = "gatewright.json"
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How a process gets at tensors of which it may hold a part alone."""

    take: Callable[[Tensor], Tensor]
    """The whole tensor; all processes that have a part of it must come here."""
    put: Callable[[Tensor, Tensor], None]
    """Copies into a tensor what is this process's of a whole value."""


ONE_PROCESS = Parts(take=lambda tensor: tensor.detach(), put=lambda tensor, value: tensor.data.copy_(value))
"""Nothing is divided."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file and the tensor of the model it holds."""

    tensor: Tensor
    fold: Callable[[Tensor], Tensor]
    """The model's layout to the file's."""
    unfold: Callable[[Tensor], Tensor]
    """The file's layout to the model's. Raises ModelError for values that the model has no place for."""
    experts: tuple[int, ...] = ()
    """Numbers of the experts along the first axis; empty for other tensors."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor in the file's layout."""
        own = self.tensor.shape
        whole = (len(self.experts), *own[1:]) if self.experts else own
        return self.fold(torch.empty(whole, dtype=self.tensor.dtype, device="meta")).shape


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter in host memory, to be written without the model."""

    entries: Mapping[str, Entry]
    config: Mapping[str, Any]
    dropout: float
    chosen: Mapping[str, list[int]]
    """Module -> adapted experts, where only some are."""
    base: str

    def write(self, folder: Path) -> list[Path]:
        """Writes the folder, and returns its files."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: entry.fold(entry.tensor).contiguous() for key, entry in self.entries.items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        _write_json(folder / CONFIG, self.config)
        notes = {
            "base": base_fingerprint(Path(self.base)),
            "dropout": self.dropout,
            "experts": self.chosen,
            "digest": _digest(self.entries),
        }
        _write_json(folder / NOTES, notes)
        return [folder / WEIGHTS, folder / CONFIG, folder / NOTES]


def take_adapter(
    model: PreTrainedModel,
    adapter: spec.Adapter,
    *,
    base: str,
    host: Callable[[str, Tensor], Tensor] | None,
    parts: Parts = ONE_PROCESS,
) -> AdapterFiles | None:
    """The adapter as it is now; `host` gives the tensor of a name in host memory, copied or not.

    None without `host`: a process that only gives its parts. Raises CheckpointError for a tensor with NaN or infinite
    values.
    """
    entries: dict[str, Entry] = {}
    for key, entry in adapter_entries(model, adapter).items():
        tensor = parts.take(entry.tensor)
        if not tensor.isfinite().all():
            raise CheckpointError(f"adapter not saved: {key.removeprefix(PREFIX)} holds NaN or infinite values")
        if host is not None:
            entries[key] = replace(entry, tensor=host(f"adapter/{key}", tensor))
    if host is None:
        return None
    config = peft_config(model, adapter)
    config.base_model_name_or_path = base
    config.inference_mode = True
    return AdapterFiles(
        entries=entries,
        config={k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()},
        dropout=adapter.dropout,
        chosen={
            name.removesuffix(f".{LORA}"): list(module.chosen)
            for name, module in model.named_modules()
            if isinstance(module, ExpertLora) and module.chosen is not None
        },
        base=base,
    )


def in_host(_: str, tensor: Tensor) -> Tensor:
    """The tensor in host memory, copied if it is elsewhere."""
    return tensor.detach().cpu()


def save_adapter(model: PreTrainedModel, adapter: spec.Adapter, folder: Path, *, base: str) -> None:
    """Writes the adapter so that stock PEFT loads the folder.

    Raises CheckpointError, before anything is written, for a tensor with NaN or infinite values.
    """
    files = take_adapter(model, adapter, base=base, host=in_host)
    assert files is not None
    files.write(folder)


def load_adapter(
    model: PreTrainedModel, adapter: spec.Adapter, folder: Path, *, base: str, parts: Parts = ONE_PROCESS
) -> None:
    """Copies a saved adapter, ours or PEFT's, into the adapters of `model`, to the bit.

    Raises ModelError, before anything is changed, for an adapter of another base model, scale, shape or set of weights,
    a damaged file, and NaN or infinite values.
    """
    for tensor, value in read_adapter(model, adapter, folder, base=base).values():
        parts.put(tensor, value)


def read_adapter(
    model: PreTrainedModel, adapter: spec.Adapter, folder: Path, *, base: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Key -> (tensor of the model, its whole value in the folder), for every part of the adapter.

    Checks as `load_adapter` says.
    """
    _refuse_other_base(folder, base)
    _refuse_other_config(folder, adapter)
    file = folder / WEIGHTS
    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: {error}; the file is missing or damaged: copy it again, or train anew") from None
    entries = adapter_entries(model, adapter)
    # PEFT saves the base weights of an adapted embedding beside the factors; they are the base model's own.
    saved = {key: value for key, value in saved.items() if not key.endswith(".base_layer.weight")}
    if odd := sorted(set(entries) ^ set(saved)):
        where = "only in the file" if odd[0] in saved else "only in the run's adapters"
        raise ModelError(
            f"{file}: {len(odd)} tensors do not match what the run adapts, the first, {where}, is "
            f"{odd[0].removeprefix(PREFIX)}; give method.adapter the targets the file was made with"
        )
    values = {}
    for key, entry in entries.items():
        if saved[key].shape != entry.shape:
            raise ModelError(
                f"{file}: {key.removeprefix(PREFIX)} has shape {tuple(saved[key].shape)}, the run's adapter "
                f"{tuple(entry.shape)}; the rank or the base model differs"
            )
        if not saved[key].isfinite().all():
            raise ModelError(f"{file}: {key.removeprefix(PREFIX)} holds NaN or infinite values; the adapter is broken")
        values[key] = (entry.tensor, entry.unfold(saved[key]))
    return values


def adapter_digest(model: PreTrainedModel, adapter: spec.Adapter) -> str:
    """Hash of the adapter as 64 hex digits, the sum modulo 2²⁵⁶ of the sha256 of each tensor, or expert's slice of one.

    The sum does not depend on an order: ranks that hold the same tensors have the same digest, and the digests of ranks
    that hold different experts add up to that of all.
    """
    return _digest(adapter_entries(model, adapter))


def _digest(entries: Mapping[str, Entry]) -> str:
    total = 0
    for key, entry in entries.items():
        tensor = entry.tensor.detach().float().cpu().contiguous()
        parts = zip(entry.experts, tensor, strict=True) if entry.experts else ((-1, tensor),)
        for expert, part in parts:
            piece = hashlib.sha256(f"{key}/{expert}/{tuple(part.shape)}/".encode())
            piece.update(part.contiguous().numpy().tobytes())
            total += int.from_bytes(piece.digest(), "big")
    return f"{total % 2**256:064x}"


def adapter_entries(model: PreTrainedModel, adapter: spec.Adapter) -> dict[str, Entry]:
    """Key in the file -> its tensor, for everything the adapter consists of, in the model's order."""
    entries: dict[str, Entry] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            entries |= _layer_entries(f"{PREFIX}{name}", module)
        elif isinstance(module, ExpertLora):
            entries |= _expert_entries(name.removesuffix(f".{LORA}"), module)
        elif isinstance(module, MatrixLora):
            path = f"{PREFIX}{name.partition('.parametrizations.')[0]}"
            entries |= {f"{path}.lora_A.weight": _as_is(module.A), f"{path}.lora_B.weight": _as_is(module.B)}
    for path in full_modules(model, adapter):
        module = model.get_submodule(path)
        entries |= {f"{PREFIX}{path}.{name}": _as_is(tensor) for name, tensor in _own_tensors(module)}
    return entries


def _as_is(tensor: Tensor) -> Entry:
    return Entry(tensor, lambda t: t.float() if t.is_floating_point() else t, lambda t: t)


def _layer_entries(path: str, layer: LoraLayer) -> dict[str, Entry]:
    if ADAPTER in layer.lora_embedding_A:
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
        return {f"{path}.lora_embedding_A": _as_is(a), f"{path}.lora_embedding_B": _as_is(b)}
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return {f"{path}.lora_A.weight": _as_is(a), f"{path}.lora_B.weight": _as_is(b)}


def _expert_entries(path: str, lora: ExpertLora) -> dict[str, Entry]:
    """PEFT's layout of a fused weight: A [E·r, in] with the experts outermost, B [out, r·E] with them innermost.

    Several weights of one module nest in the order it declares them: the first lies deepest under `base_layer`.
    """
    numbers, count = list(lora.numbers), lora.experts

    def fold_a(a_CrI: Tensor) -> Tensor:
        return _spread(a_CrI, numbers, count).flatten(0, 1)

    def fold_b(b_COr: Tensor) -> Tensor:
        return _spread(b_COr, numbers, count).permute(1, 2, 0).flatten(1)

    def unfold_a(a_XI: Tensor) -> Tensor:
        return _pick(a_XI.unflatten(0, (count, -1)), numbers, path)

    def unfold_b(b_OX: Tensor) -> Tensor:
        return _pick(b_OX.unflatten(1, (-1, count)).permute(2, 0, 1), numbers, path)

    entries = {}
    for depth, weight in enumerate(reversed(lora.A)):
        key = f"{PREFIX}{path}" + ".base_layer" * depth
        entries[f"{key}.lora_A.weight"] = Entry(lora.A[weight], fold_a, unfold_a, lora.numbers)
        entries[f"{key}.lora_B.weight"] = Entry(lora.B[weight], fold_b, unfold_b, lora.numbers)
    return entries


def _spread(part_C: Tensor, numbers: list[int], count: int) -> Tensor:
    """[E, …] with zeros for the experts that have none."""
    if len(numbers) == count:
        return part_C
    whole_E = part_C.new_zeros(count, *part_C.shape[1:])
    whole_E[numbers] = part_C
    return whole_E


def _pick(whole_E: Tensor, numbers: list[int], path: str) -> Tensor:
    others = torch.ones(len(whole_E), dtype=torch.bool)
    others[numbers] = False
    if whole_E[others].any():
        first = int(whole_E.flatten(1).any(dim=1).logical_and(others).nonzero()[0])
        raise ModelError(
            f"{path}: the file has an update of expert {first}, which this run does not adapt; set "
            "method.adapter.experts to what the file was made with"
        )
    return whole_E[numbers]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of the module itself, a weight held in float32 in that form."""
    for name, parameter in module.named_parameters(recurse=False):
        yield name, parameter
    if parametrize.is_parametrized(module):
        for name, held in module.parametrizations.items():
            if isinstance(held[0], Rounded):
                yield name, held.original
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _refuse_other_base(folder: Path, base: str) -> None:
    file = folder / NOTES
    if not file.exists():  # made by PEFT
        return
    then, now = _read_json(file).get("base"), base_fingerprint(Path(base))
    if then != now:
        raise ModelError(
            f"{folder}: this adapter was trained on another base model than {base} (fingerprint {str(then)[:12]} then, "
            f"{now[:12]} now); an adapter fits the weights it was trained on only: set model.path to those"
        )


def _refuse_other_config(folder: Path, adapter: spec.Adapter) -> None:
    config = _read_json(folder / CONFIG)
    unknown = [key for key in ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias") if config.get(key)]
    if config.get("peft_type") != "LORA" or unknown:
        what = ", ".join(unknown) or f"peft_type {config.get('peft_type')}"
        raise ModelError(f"{folder / CONFIG}: {what}: only plain LoRA of one rank and alpha can be taken up")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for field, then, now in (
        ("rank", rank, adapter.rank),
        ("alpha", alpha, adapter.alpha_value),
        ("rslora", bool(config.get("use_rslora")), adapter.rslora),
    ):
        if then != now:
            raise ModelError(
                f"{folder / CONFIG}: the adapter was made with {field} {then}, method.adapter says {now}; its update "
                f"would have another size: set method.adapter.{field}: {json.dumps(then)}"
            )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}; the adapter folder is incomplete or damaged") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file}: not a JSON object; the adapter folder is damaged")
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
