"""Adapters: which weights get a low-rank update, the update itself, and the folder PEFT can load.

Linear layers take PEFT's own LoRA layer, put in place by us: PEFT's injection rewrites names such as `gate_proj` to the
fused experts in many MoE families, so that one config trains different weights in different versions. Fused experts
take our grouped pairs (model/experts.py). Both are written as one PEFT adapter.
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.model.experts import find_experts, lora_shapes
from gatewright.model.roles import ROLES, is_attention, parameter_roles
from gatewright.spec import run as spec
from gatewright.spec.errors import CheckpointError, ModelError

ADAPTER = "default"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

Coverage = list[dict[str, int | str | bool]]


def add_adapters(model: PreTrainedModel, adapter: spec.Adapter, *, seed: int) -> Coverage:
    """Adds LoRA to every weight of the targeted roles, leaves all else frozen, and returns what trains, by role.

    A is drawn uniformly in ±1/√in (what PEFT's default amounts to) by a generator of its own for each weight and
    expert, so the values do not depend on the order of layers or on how experts are spread over ranks; B is zero.
    Raises ModelError when a role matches nothing, or a matched weight cannot take an adapter.
    """
    roles = parameter_roles(model)
    linears = {
        name: roles[f"{name}.weight"]
        for name, module in model.named_modules()
        if type(module).forward is nn.Linear.forward and roles.get(f"{name}.weight") in adapter.targets
    }
    experts = find_experts(model) if "experts" in adapter.targets else {}
    _refuse_empty(adapter, roles, linears, bool(experts))
    base = {role: sum(1 for r in roles.values() if r == role) for role in ROLES}
    sizes = {role: sum(p.numel() for n, p in model.named_parameters() if roles[n] == role) for role in ROLES}

    trained = dict.fromkeys(ROLES, 0)
    adapted = dict.fromkeys(ROLES, 0)
    config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha_value, lora_dropout=adapter.dropout, use_rslora=adapter.rslora
    )
    for name, role in linears.items():
        lora = LoraLinear(model.get_submodule(name), ADAPTER, config, r=adapter.rank, lora_alpha=adapter.alpha_value)
        model.set_submodule(name, lora)
        a, b = lora.lora_A[ADAPTER].weight, lora.lora_B[ADAPTER].weight
        a.data = _draw(a.shape, f"{name}.lora_A", seed=seed, fan_in=a.shape[1]).to(a.device)
        b.data = torch.zeros_like(b, dtype=torch.float32)
        trained[role] += a.numel() + b.numel()
        adapted[role] += 1
    for layer, module in experts.items():
        lora = ExpertLora(lora_shapes(module), adapter.rank, adapter.scale, next(module.parameters()).device)
        for name, a_ErI in lora.A.items():
            for expert in range(a_ErI.shape[0]):
                number = module.gatewright_first_expert + expert
                drawn = _draw(a_ErI.shape[1:], f"{layer}.{number}.{name}.lora_A", seed=seed, fan_in=a_ErI.shape[2])
                a_ErI.data[expert] = drawn.to(a_ErI.device)
            trained["experts"] += a_ErI.numel() + lora.B[name].numel()
            adapted["experts"] += 1
        module.add_module(LORA, lora)
    return [
        {
            "role": role,
            "trains": trained[role] > 0,
            "modules": adapted[role] if trained[role] else base[role],
            "parameters": sizes[role],
            "trainable_parameters": trained[role],
            "rank": adapter.rank if trained[role] else 0,
        }
        for role in ROLES
        if base[role]
    ]


def train_everything(model: PreTrainedModel) -> Coverage:
    """Unfreezes every weight but the router's (full fine-tuning) and returns what trains, by role."""
    roles = parameter_roles(model)
    rows: dict[str, dict[str, int | str | bool]] = {}
    for name, parameter in model.named_parameters():
        role = roles[name]
        parameter.requires_grad_(role != "router")
        row = rows.setdefault(
            role,
            {
                "role": role,
                "trains": role != "router",
                "modules": 0,
                "parameters": 0,
                "trainable_parameters": 0,
                "rank": 0,
            },
        )
        row["modules"] = int(row["modules"]) + 1
        row["parameters"] = int(row["parameters"]) + parameter.numel()
        row["trainable_parameters"] = int(row["trainable_parameters"]) + parameter.numel() * parameter.requires_grad
    return [rows[role] for role in ROLES if role in rows]


def save_adapter(model: PreTrainedModel, adapter: spec.Adapter, folder: Path, *, base: str) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, float32, so that stock PEFT loads the folder.

    PEFT's layout for a fused weight of E experts: A [E·r, in] with the experts outermost, B [out, r·E] with the
    experts innermost. Two weights on one experts module nest: the first declared one lies under `base_layer`.
    """
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            tensors[f"base_model.model.{name}.lora_A.weight"] = module.lora_A[ADAPTER].weight
            tensors[f"base_model.model.{name}.lora_B.weight"] = module.lora_B[ADAPTER].weight
        elif isinstance(module, ExpertLora):
            path = name.removesuffix(f".{LORA}")
            experts[path] = list(module.A)
            for weight, key in _expert_keys(path, list(module.A)).items():
                a_ErI, b_EOr = module.A[weight], module.B[weight]
                tensors[f"{key}.lora_A.weight"] = a_ErI.flatten(0, 1)
                tensors[f"{key}.lora_B.weight"] = b_EOr.permute(1, 2, 0).flatten(1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    config = _peft_config(adapter, model, experts)
    config.base_model_name_or_path = base
    config.inference_mode = True
    text = json.dumps(
        {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}, indent=2, default=str
    )
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copies a saved adapter into the adapters of `model`, which must be of the same shape, to the bit."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {error}") from None
    wanted: dict[str, tuple[nn.Parameter, Tensor | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            for part, layer in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
                key = f"base_model.model.{name}.{part}.weight"
                wanted[key] = (layer[ADAPTER].weight, tensors.get(key))
        elif isinstance(module, ExpertLora):
            for weight, key in _expert_keys(name.removesuffix(f".{LORA}"), list(module.A)).items():
                a, b = tensors.get(f"{key}.lora_A.weight"), tensors.get(f"{key}.lora_B.weight")
                count = module.A[weight].shape[0]
                wanted[f"{key}.lora_A.weight"] = (module.A[weight], None if a is None else a.unflatten(0, (count, -1)))
                unflat = None if b is None else b.unflatten(1, (-1, count)).permute(2, 0, 1)
                wanted[f"{key}.lora_B.weight"] = (module.B[weight], unflat)
    if set(wanted) != set(tensors):
        odd = sorted(set(wanted) ^ set(tensors))
        raise CheckpointError(
            f"{folder / WEIGHTS}: {len(odd)} tensors do not match the run's adapters, the first is {odd[0]}"
        )
    for key, (parameter, value) in wanted.items():
        if value is None or value.shape != parameter.shape:
            got = None if value is None else tuple(value.shape)
            raise CheckpointError(
                f"{folder / WEIGHTS}: {key} has shape {got}, the run's adapter {tuple(parameter.shape)}"
            )
        parameter.data.copy_(value)


def _expert_keys(path: str, weights: list[str]) -> dict[str, str]:
    """Weight name -> prefix of its tensors in PEFT's file: the last declared weight is the outermost wrapper."""
    depth = len(weights) - 1
    return {weight: f"base_model.model.{path}" + ".base_layer" * (depth - i) for i, weight in enumerate(weights)}


def _peft_config(adapter: spec.Adapter, model: PreTrainedModel, experts: dict[str, list[str]]) -> LoraConfig:
    """What stock PEFT needs to rebuild these adapters.

    In a MoE model, linear layers outside attention are named as parameters (`mlp.gate_proj.weight`): named as modules,
    PEFT 0.21 would take their `gate_proj` for that of the fused experts.
    """
    every = {
        n: m
        for n, m in model.named_modules()
        if (isinstance(m, nn.Linear) and ".lora_" not in n) or isinstance(m, LoraLayer)
    }
    every = {n: m for n, m in every.items() if not n.endswith(".base_layer")}
    wanted = {name for name, module in every.items() if isinstance(module, LoraLayer)}
    as_parameters = {name for name in wanted if find_experts(model) and not is_attention(name)}
    modules = _suffixes(wanted - as_parameters, among=set(every))
    parameters = {f"{suffix}.weight" for suffix in _suffixes(as_parameters, among=set(every))}
    parameters |= {f"{path.rpartition('.')[2]}.{weight}" for path, names in experts.items() for weight in names}
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha_value,
        lora_dropout=0.0 if parameters else adapter.dropout,
        use_rslora=adapter.rslora,
        target_modules=sorted(modules),
        target_parameters=sorted(parameters) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _suffixes(wanted: set[str], *, among: set[str]) -> set[str]:
    """The shortest name endings that match every wanted name and, of all names in `among`, no other."""
    found = set()
    for name in wanted:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            ending = ".".join(parts[-count:])
            if all(other in wanted for other in among if other == ending or other.endswith(f".{ending}")):
                found.add(ending)
                break
    return found


def _draw(shape: torch.Size, name: str, *, seed: int, fan_in: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(fan_in)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _refuse_empty(adapter: spec.Adapter, roles: dict[str, str], linears: dict[str, str], experts: bool) -> None:
    for role in adapter.targets:
        if role == "experts" and experts:
            continue
        if role != "experts" and role in linears.values():
            continue
        have = sorted(set(roles.values()) & {"attention", "mlp", "experts", "shared_experts"})
        raise ModelError(
            f"method.adapter.targets: {role!r} matches no weight of this model, which has {', '.join(have)}; "
            f"remove it from the list"
        )
