"""Adapters put in place: low-rank updates on the targeted weights, weights that train in full beside them.

Linear layers and the embedding take PEFT's own LoRA layers, put in place by us: PEFT's injection rewrites names such as
`gate_proj` to the fused experts in many MoE families, so that one config trains different weights in different
versions. Fused experts take our grouped pairs (model/expert_lora.py), bare matrices such as a router's W + s·B·A. All
of it is written as one PEFT adapter (model/adapter_files.py).
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from peft import LoraConfig
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.model.experts import lora_shapes
from gatewright.model.head import whole
from gatewright.model.roles import ROLES, head_is_tied, parameter_roles
from gatewright.model.targets import Target, choose_targets
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError

ADAPTER = "default"


def add_adapters(
    model: PreTrainedModel,
    adapter: spec.Adapter,
    *,
    seed: int,
    chosen: Mapping[int, Sequence[int]] | None = None,
    kept: Collection[str] = (),
    placed: Callable[[str], None] | None = None,
) -> list[str]:
    """Adds LoRA to every targeted weight, lets the roles of `adapter.full` train, and returns notes for the user.

    A is drawn uniformly in ±1/√in (what PEFT's default amounts to) by a generator of its own for each weight and
    expert, so the values do not depend on the order of layers or on how experts are spread over ranks; B is zero. In
    the embedding, as in PEFT, A is zero and B normal. `chosen`: layer -> the experts that get a pair; None: all.
    `kept`: roles of `adapter.full` that are saved with the adapter but stay frozen. `placed`: called with the path of
    each module as soon as its adapter, or its copy in float32, is in place.
    Raises ModelError when a target matches nothing or less than it says, or a matched weight cannot take an adapter.
    """
    targets, notes = choose_targets(model, adapter)
    full = full_modules(model, adapter)
    dense = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha_value, lora_dropout=adapter.dropout, use_rslora=adapter.rslora
    )
    placed = placed or (lambda path: None)
    for path, group in itertools.groupby(targets, key=attrgetter("path")):
        first, *others = group
        if first.kind == "linear":
            _adapt_linear(model, path, dense, seed=seed)
        elif first.kind == "embedding":
            _adapt_embedding(model, path, dense, seed=seed)
        elif first.kind == "matrix":
            _adapt_matrix(model, path, adapter, seed=seed)
        elif chosen is None:
            _adapt_experts(model, [first, *others], adapter, seed=seed, chosen=None)
        elif first.layer is not None and first.layer in chosen:
            _adapt_experts(model, [first, *others], adapter, seed=seed, chosen=chosen[first.layer])
        placed(path)
    for path in full:
        _hold_in_float32(model.get_submodule(path))
        placed(path)
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        if roles[name] in adapter.full and parameter.is_floating_point():
            parameter.requires_grad_(roles[name] not in kept)
    return notes


def train_weights(model: PreTrainedModel, roles: Sequence[str] | None, *, router: bool) -> None:
    """Unfreezes the weights of these roles, by default all but the router's, which `router` adds (full fine-tuning).

    Raises ModelError for a role that this model does not have.
    """
    have = parameter_roles(model)
    wanted = set(roles) if roles else set(ROLES) - {"router"}
    wanted |= {"router"} if router else set()
    for role in roles or []:
        if role not in have.values():
            tied = " (its head is the embedding's weight)" if role == "head" and head_is_tied(model) else ""
            raise ModelError(
                f"method.roles: {role!r} matches no weight of this model{tied}, which has "
                f"{', '.join(r for r in ROLES if r in have.values())}; remove it from the list"
            )
    for name, parameter in model.named_parameters():
        if have[name] in wanted and parameter.is_floating_point():
            parameter.requires_grad_()


def full_modules(model: PreTrainedModel, adapter: spec.Adapter) -> list[str]:
    """Paths of the modules whose own weights belong to a role of `adapter.full`. Raises ModelError where there is none.

    Works before and after the adapters are added.
    """
    roles = parameter_roles(model)
    found = []
    for role in adapter.full:
        paths = [_owner(name) for name, r in roles.items() if r == role]
        if not paths:
            raise ModelError(f"method.adapter.full: {role!r} matches no weight of this model; remove it from the list")
        found += list(dict.fromkeys(paths))
    return found


class MatrixLora(nn.Module):
    """W -> W + s·B·A, for a weight that no linear layer holds; float32 factors A [r, in], B [out, r]."""

    def __init__(self, weight: Tensor, *, rank: int, scale: float) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        self.scale = scale
        self.A = nn.Parameter(torch.empty(rank, in_features, device=weight.device))
        self.B = nn.Parameter(torch.zeros(out_features, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.B @ self.A * self.scale).to(weight.dtype)


class Rounded(nn.Module):
    """A weight held and trained in float32, seen by the model in the model's type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return whole(weight).to(self.dtype)


def _adapt_linear(model: PreTrainedModel, path: str, config: LoraConfig, *, seed: int) -> None:
    base = model.get_submodule(path)
    lora = LoraLinear(base, ADAPTER, config, r=config.r, lora_alpha=config.lora_alpha)
    a, b = lora.lora_A[ADAPTER].weight, lora.lora_B[ADAPTER].weight
    # The layer's own sizes: PEFT takes those of the weight, which may be this rank's part of it.
    shape = (config.r, base.in_features)
    a.data = _draw(shape, f"{path}.lora_A", seed=seed, fan_in=base.in_features).to(base.weight.device)
    b.data = torch.zeros(base.out_features, config.r, device=base.weight.device)
    model.set_submodule(path, lora)


def _adapt_embedding(model: PreTrainedModel, path: str, config: LoraConfig, *, seed: int) -> None:
    base = model.get_submodule(path)
    lora = LoraEmbedding(base, ADAPTER, config, r=config.r, lora_alpha=config.lora_alpha)
    a, b = lora.lora_embedding_A[ADAPTER], lora.lora_embedding_B[ADAPTER]
    a.data = torch.zeros(a.shape, device=base.weight.device)
    normal = torch.empty(b.shape).normal_(generator=_generator(f"{path}.lora_embedding_B", seed=seed))
    b.data = normal.to(base.weight.device)
    lora.num_embeddings = base.num_embeddings
    model.set_submodule(path, lora)


def _adapt_matrix(model: PreTrainedModel, path: str, adapter: spec.Adapter, *, seed: int) -> None:
    module = model.get_submodule(path)
    lora = MatrixLora(module.weight, rank=adapter.rank, scale=adapter.scale)
    drawn = _draw(lora.A.shape, f"{path}.lora_A", seed=seed, fan_in=lora.A.shape[1])
    lora.A.data.copy_(drawn)
    parametrize.register_parametrization(module, "weight", lora, unsafe=True)  # a divided weight cannot be tried


def _adapt_experts(
    model: PreTrainedModel,
    targets: Sequence[Target],
    adapter: spec.Adapter,
    *,
    seed: int,
    chosen: Sequence[int] | None,
) -> None:
    path = targets[0].path
    experts = model.get_submodule(path)
    shapes = {name: shape for name, shape in lora_shapes(experts).items() if name in {t.weight for t in targets}}
    device = experts._parameters["down_proj"].device
    lora = ExpertLora(
        shapes, adapter.rank, adapter.scale, device,
        chosen=chosen, held=experts.gatewright_held, dropout=adapter.dropout,
    )  # fmt: skip
    for name, a_CrI in lora.A.items():
        for place, expert in enumerate(lora.numbers):
            key = f"{path}.{experts.gatewright_held[expert]}.{name}.lora_A"
            a_CrI.data[place] = _draw(a_CrI.shape[1:], key, seed=seed, fan_in=a_CrI.shape[2]).to(device)
    experts.add_module(LORA, lora)


def _hold_in_float32(module: nn.Module) -> None:
    """Keeps a module's own weights in float32, whatever the model computes in."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            parametrize.register_parametrization(module, name, Rounded(parameter.dtype), unsafe=True)
            module.parametrizations[name].original.data = parameter.data.float()


def _owner(name: str) -> str:
    """The module that a parameter belongs to, be it held in another form or not."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]


def _draw(shape: Iterable[int], name: str, *, seed: int, fan_in: int) -> Tensor:
    bound = 1.0 / math.sqrt(fan_in)
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=_generator(name, seed=seed))


def _generator(name: str, *, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
