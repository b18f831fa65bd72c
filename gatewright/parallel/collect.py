"""What is divided over ranks, made whole again: for files that must not depend on how a run was laid out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

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
def whole_adapters(model: PreTrainedModel, ranks: Ranks) -> Iterator[None]:
    """Inside the block the adapters of experts are whole on every rank; after it each rank keeps its own part.

    What the block writes into them, as loading does, stays.
    """
    if ranks.layout.ep == 1:
        yield
        return
    adapted = [
        (experts, experts._modules[LORA]) for experts in find_experts(model).values() if LORA in experts._modules
    ]
    own: dict[nn.Parameter, Tensor] = {}
    for experts, lora in adapted:
        for parameter in lora.parameters():
            own[parameter] = parameter.data
            parameter.data = _by_number(_gather_rows(parameter.data, ranks), experts.gatewright_order)
        lora.experts = experts.num_experts
    try:
        yield
    finally:
        for experts, lora in adapted:
            lora.experts = len(experts.gatewright_held)
            for parameter in lora.parameters():
                # Into its own tensor: what ZeRO-2 updates is a view of that.
                parameter.data = own[parameter].copy_(parameter.data[list(experts.gatewright_held)])


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
    """Those of them that are plain tensors with the experts of this rank alone."""
    stacks = expert_stacks(model, ranks)
    return {name: order for name, order in stacks.items() if not isinstance(model.get_parameter(name), DTensor)}


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
