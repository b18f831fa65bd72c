"""What trains, weight by weight, read off the model itself: by role and layer, with its bytes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

from torch import nn
from transformers import PreTrainedModel

from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.model.roles import ROLES, bare_name, layer_of, parameter_roles
from gatewright.spec.eight_bit import BYTES_8BIT, SMALL_8BIT
from gatewright.spec.errors import ModelError

FILE = "coverage.json"

Row = dict[str, int | str | bool]


@dataclass(slots=True, kw_only=True)
class Coverage:
    """One role in one layer (or outside the layers)."""

    role: str
    layer: int | None
    trains: str = "frozen"
    """frozen, adapter, full, or full + adapter where some weights have the one and some the other."""
    weights: int = 0
    """Weights of the model that change: those with an adapter, and those that train in full."""
    of_weights: int = 0
    """All weights of the role."""
    parameters: int = 0
    """Numbers in them."""
    trainable_parameters: int = 0
    rank: int = 0
    experts: int = 0
    """Experts that have an adapter; 0 where none has, or outside the experts."""
    weight_bytes: int = 0
    """Of what trains, as of the next two."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


def coverage(
    model: PreTrainedModel, *, optimizer: str, whole: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[Coverage]:
    """What trains, a row for each role and layer, in the model's order of layers. `optimizer`: train.optimizer.

    `whole`: name of a parameter that is this rank's part of one -> the shape of that; counts are of the whole model.
    Raises ModelError where an adapter stands beside a weight, yet does not train.
    """
    roles = parameter_roles(model)
    loras = {name.removesuffix(f".{LORA}") for name, m in model.named_modules() if isinstance(m, ExpertLora)}
    rows: dict[tuple[str, int], Coverage] = {}
    changed: dict[tuple[str, int], set[str]] = {}
    for name, parameter in model.named_parameters():
        bare, is_adapter = bare_name(name)
        layer, role = layer_of(bare), roles[name]
        key = (role, -1 if layer is None else layer)
        row = rows.setdefault(key, Coverage(role=role, layer=layer))
        shape = whole.get(name, tuple(parameter.shape))
        count = prod(shape)
        if not is_adapter:
            row.of_weights += 1
            row.parameters += count
        elif not parameter.requires_grad:
            raise ModelError(f"{name} is an adapter that does not train; this is a fault of the program")
        if not parameter.requires_grad:
            continue
        changed.setdefault(key, set()).add(bare)
        row.weights = len(changed[key])
        row.trains = _how(row.trains, "adapter" if is_adapter else "full")
        row.trainable_parameters += count
        row.weight_bytes += count * parameter.itemsize
        row.gradient_bytes += count * parameter.itemsize
        row.optimizer_bytes += _optimizer_bytes(count, parameter.itemsize, optimizer)
        if is_adapter:
            row.rank = _rank(name, parameter)
        if bare.rpartition(".")[0] in loras:
            row.experts = shape[0]
    return sorted(rows.values(), key=lambda row: (ROLES.index(row.role), -1 if row.layer is None else row.layer))


def by_role(rows: Iterable[Coverage]) -> list[Row]:
    """The rows of a ModelLoaded event: one a role, summed over its layers."""
    totals: dict[str, Row] = {}
    for row in rows:
        start: Row = {"role": row.role, "trains": False, "how": "frozen", "rank": 0, "layers": 0, "of_layers": 0}
        total = totals.setdefault(row.role, start | dict.fromkeys(_SUMS.values(), 0))
        total["of_layers"] = int(total["of_layers"]) + 1
        total["layers"] = int(total["layers"]) + (row.trains != "frozen")
        total["trains"] = bool(total["trains"]) or row.trains != "frozen"
        if row.trains != "frozen":
            total["how"] = row.trains if total["how"] == "frozen" else _how(str(total["how"]), row.trains)
        total["rank"] = max(int(total["rank"]), row.rank)
        values = asdict(row)
        for field, name in _SUMS.items():
            total[name] = int(total[name]) + values[field]
    for total in totals.values():
        if not total["trains"]:
            total["modules"] = total["of_modules"]
    return list(totals.values())


def write_coverage(rows: Iterable[Coverage], folder: Path) -> None:
    """Writes coverage.json into a run folder: one object a role and layer, with the fields of Coverage."""
    text = json.dumps([asdict(row) for row in rows], indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


_SUMS = {
    "weights": "modules",
    "of_weights": "of_modules",
    "parameters": "parameters",
    "trainable_parameters": "trainable_parameters",
    "experts": "experts",
    "weight_bytes": "weight_bytes",
    "gradient_bytes": "gradient_bytes",
    "optimizer_bytes": "optimizer_bytes",
}


def _how(before: str, now: str) -> str:
    return now if before in ("frozen", now) else "full + adapter"


def _rank(name: str, parameter: nn.Parameter) -> int:
    """Rank of the low-rank update that a factor belongs to: A is [.., r, in] and B [.., out, r]."""
    is_a = ".lora_A." in name or ".lora_embedding_A." in name or ".A." in name or name.endswith(".A")
    return parameter.shape[-2] if is_a else parameter.shape[-1]


def _optimizer_bytes(count: int, itemsize: int, optimizer: str) -> int:
    """Two moments, in the weight's own type; torch keeps a float32 step beside them."""
    if optimizer == "adamw8bit":
        return round(count * BYTES_8BIT) if count >= SMALL_8BIT else 8 * count
    return 2 * count * itemsize + 4
