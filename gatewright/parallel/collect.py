"""What is divided over ranks, made whole again: for files that must not depend on how a run was laid out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """How the expert-parallel ranks together hold a stack with one row an expert, or one for each chosen expert."""

    order: tuple[int, ...]
    """The row of the whole stack, where experts lie by number, at each position: rank after rank."""
    counts: tuple[int, ...]
    """Rows of each rank."""

    def rows(self, rank: int) -> tuple[int, ...]:
        """Those of the whole stack that one rank has."""
        first = self.first(rank)
        return self.order[first : first + self.counts[rank]]

    def first(self, rank: int) -> int:
        """Position of a rank's first row."""
        return sum(self.counts[:rank])


@torch.no_grad()
def whole_state(model: PreTrainedModel, ranks: Ranks) -> dict[str, Tensor]:
    """The model's state dict as one process would have it, on the CPU of the first rank; empty on the others.

    Every rank must call this; one tensor at a time is gathered.
    """
    stacks, divided = expert_stacks(model, ranks), divided_stacks(model, ranks)
    state = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if name in divided:
            tensor = _gather_rows(tensor, divided[name], ranks)
        if name in stacks:
            tensor = _by_number(tensor, stacks[name].order)
        if ranks.first:
            state[name] = tensor.detach().cpu()
    return state


@contextmanager
def whole_adapters(model: PreTrainedModel, ranks: Ranks) -> Iterator[Parts]:
    """Inside the block the adapters of experts count all experts; yields how a rank gets at what it has a part of.

    Every rank must take the same tensors in the same order; one at a time is gathered.
    """
    adapted = [
        (lora, _adapter_stack(experts, lora, ep=ranks.layout.ep), lora.experts, lora.chosen)
        for experts in find_experts(model).values()
        if ranks.layout.ep > 1 and (lora := experts._modules.get(LORA)) is not None
    ]
    stack_of = {parameter: stack for lora, stack, _, _ in adapted for parameter in lora.parameters()}

    def take(tensor: Tensor) -> Tensor:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if (stack := stack_of.get(tensor)) is None:
            return whole
        return _by_number(_gather_rows(whole, stack, ranks), stack.order)

    def put(tensor: Tensor, value: Tensor) -> None:
        if stack := stack_of.get(tensor):
            value = value[list(stack.rows(ranks.position("ep")))]
        if isinstance(tensor, DTensor):
            place = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            (rows, *_), (first, *_) = place
            tensor, value = tensor.to_local(), value[first : first + rows]
        # Into its own tensor: what ZeRO updates is a view of that.
        tensor.data.copy_(value)

    for lora, _, experts, _ in adapted:
        lora.experts, lora.chosen = experts * ranks.layout.ep, lora.adapted
    try:
        yield Parts(take=torch.no_grad()(take), put=torch.no_grad()(put))
    finally:
        for lora, _, experts, chosen in adapted:
            lora.experts, lora.chosen = experts, chosen


def expert_stacks(model: PreTrainedModel, ranks: Ranks) -> dict[str, Stack]:
    """Name of each parameter that is divided by experts, adapters too -> how ranks hold it."""
    ep = ranks.layout.ep
    if ep == 1:
        return {}
    paths = {module: path for path, module in model.named_modules()}
    found: dict[str, Stack] = {}
    for module in find_experts(model).values():
        whole = _stack(module.gatewright_order, range(module.num_experts), ep=ep)
        found |= {f"{paths[module]}.{name}": whole for name in own_stacks(module)}
        if (lora := module._modules.get(LORA)) is not None:
            stack = _adapter_stack(module, lora, ep=ep)
            found |= {f"{paths[module]}.{LORA}.{name}": stack for name, _ in lora.named_parameters()}
    return found


def _adapter_stack(experts: nn.Module, lora: nn.Module, *, ep: int) -> Stack:
    numbers = range(experts.num_experts) if lora.adapted is None else lora.adapted
    return _stack(experts.gatewright_order, numbers, ep=ep)


def _stack(order: Sequence[int], numbers: Sequence[int], *, ep: int) -> Stack:
    """A stack of the experts `numbers`, in rising order, where ranks hold all experts in this `order`."""
    row, each = {expert: row for row, expert in enumerate(numbers)}, len(order) // ep
    held = [[row[e] for e in order[first : first + each] if e in row] for first in range(0, len(order), each)]
    return Stack(order=tuple(chain.from_iterable(held)), counts=tuple(map(len, held)))


def own_stacks(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own weights with one entry for each expert: this rank's part, or a DTensor."""
    sizes = {True: experts.num_experts, False: len(experts.gatewright_held)}
    weights = experts.named_parameters(recurse=False)
    return {name: weight for name, weight in weights if len(weight) == sizes[isinstance(weight, DTensor)]}


def divided_stacks(model: PreTrainedModel, ranks: Ranks) -> dict[str, Stack]:
    """Those of them whose first axis has this rank's experts alone: adapters, and weights that are plain tensors."""
    stacks = expert_stacks(model, ranks)
    return {n: s for n, s in stacks.items() if f".{LORA}." in n or not isinstance(model.get_parameter(n), DTensor)}


def whole_shapes(model: PreTrainedModel, ranks: Ranks) -> dict[str, tuple[int, ...]]:
    """Shape of all ranks' experts together, of each parameter that is this rank's alone."""
    stacks = divided_stacks(model, ranks)
    return {name: (len(stack.order), *model.get_parameter(name).shape[1:]) for name, stack in stacks.items()}


def _by_number(stack: Tensor, order: Sequence[int]) -> Tensor:
    """A whole stack in the order of the experts' numbers, from that in which the ranks hold them."""
    if tuple(order) == tuple(range(len(order))):
        return stack
    numbered = torch.empty_like(stack)
    numbered[list(order)] = stack
    return numbered


def _gather_rows(tensor: Tensor, stack: Stack, ranks: Ranks) -> Tensor:
    """The entries of all experts, in the order in which the ranks hold them."""
    group, most = ranks.part("ep").get_group(), max(stack.counts)
    mine = tensor.new_zeros(most, *tensor.shape[1:])
    mine[: len(tensor)] = tensor
    every = [torch.empty_like(mine) for _ in stack.counts]
    dist.all_gather(every, mine, group=group)
    return torch.cat([rows[:count] for rows, count in zip(every, stack.counts, strict=True)])
