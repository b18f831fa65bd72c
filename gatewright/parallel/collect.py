"""What is divided over ranks, made whole again: for files that must not depend on how a run was laid out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from gatewright.model.adapter_files import Parts
from gatewright.model.expert_lora import LORA
from gatewright.model.experts import find_experts
from gatewright.parallel.ranks import Ranks


@torch.no_grad()
def whole_state(model: PreTrainedModel, ranks: Ranks) -> dict[str, Tensor]:
    """The model's state dict as one process would have it, on the CPU of the first rank; empty on the others.

    Every rank must call this; one tensor at a time is gathered.
    """
    orders, divided = expert_stacks(model, ranks), divided_stacks(model, ranks)
    state = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        elif name in divided:
            tensor = _gather_rows(tensor, ranks)
        if name in orders:
            tensor = _by_number(tensor, orders[name])
        if ranks.first:
            state[name] = tensor.detach().cpu()
    return state


@contextmanager
def whole_adapters(model: PreTrainedModel, ranks: Ranks) -> Iterator[Parts]:
    """Inside the block the adapters of experts count all experts; yields how a rank gets at what it has a part of.

    Every rank must take the same tensors in the same order; one at a time is gathered.
    """
    adapted = [m for m in find_experts(model).values() if LORA in m._modules] if ranks.layout.ep > 1 else []
    experts_of = {parameter: m for m in adapted for parameter in m._modules[LORA].parameters()}

    def take(tensor: Tensor) -> Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if (experts := experts_of.get(tensor)) is None:
            return whole
        return _by_number(_gather_rows(whole, ranks), experts.gatewright_order)

    def put(tensor: Tensor, value: Tensor) -> None:
        if experts := experts_of.get(tensor):
            value = value[list(experts.gatewright_held)]
        if isinstance(tensor, DTensor):
            place = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            (rows, *_), (first, *_) = place
            tensor, value = tensor.to_local(), value[first : first + rows]
        # Into its own tensor: what ZeRO updates is a view of that.
        tensor.data.copy_(value)

    for experts in adapted:
        experts._modules[LORA].experts = experts.num_experts
    try:
        yield Parts(take=torch.no_grad()(take), put=torch.no_grad()(put))
    finally:
        for experts in adapted:
            experts._modules[LORA].experts = len(experts.gatewright_held)


def expert_stacks(model: PreTrainedModel, ranks: Ranks) -> dict[str, Sequence[int]]:
    """Name of each parameter that is divided by experts, adapters too -> all its experts, in the order of the ranks."""
    if ranks.layout.ep == 1:
        return {}
    paths = {module: path for path, module in model.named_modules()}
    found: dict[str, Sequence[int]] = {}
    for module in find_experts(model).values():
        adapters = [name for name, _ in module.named_parameters() if name.startswith(f"{LORA}.")]
        for name in [*own_stacks(module), *adapters]:
            found[f"{paths[module]}.{name}"] = module.gatewright_order
    return found


def own_stacks(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own weights with one entry for each expert: this rank's part, or a DTensor."""
    sizes = {True: experts.num_experts, False: len(experts.gatewright_held)}
    weights = experts.named_parameters(recurse=False)
    return {name: weight for name, weight in weights if len(weight) == sizes[isinstance(weight, DTensor)]}


def divided_stacks(model: PreTrainedModel, ranks: Ranks) -> dict[str, Sequence[int]]:
    """Those of them whose first axis has this rank's experts alone: adapters, and weights that are plain tensors."""
    stacks = expert_stacks(model, ranks)
    return {n: o for n, o in stacks.items() if f".{LORA}." in n or not isinstance(model.get_parameter(n), DTensor)}


def _by_number(stack: Tensor, order: Sequence[int]) -> Tensor:
    """A whole stack in the order of the experts' numbers, from that in which the ranks hold them."""
    if tuple(order) == tuple(range(len(order))):
        return stack
    numbered = torch.empty_like(stack)
    numbered[list(order)] = stack
    return numbered


def _gather_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The entries of all experts, in the order in which the ranks hold them."""
    group = ranks.part("ep").get_group()
    every = [torch.empty_like(tensor) for _ in range(ranks.layout.ep)]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return torch.cat(every)
