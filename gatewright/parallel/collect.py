"""What is divided over ranks, made whole again: for files that must not depend on how a run was laid out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.model.experts import find_experts
from gatewright.parallel.ranks import Ranks


@torch.no_grad()
def whole_state(model: PreTrainedModel, ranks: Ranks) -> dict[str, Tensor]:
    """The model's state dict as one process would have it, on the CPU of the first rank; empty on the others.

    Every rank must call this; one tensor at a time is gathered.
    """
    stacks = divided_stacks(model, ranks)
    state = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        elif name in stacks:
            tensor = _gather_rows(tensor, ranks)
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
    own: list[tuple[nn.Parameter, Tensor]] = []
    divided = [module for module in model.modules() if isinstance(module, ExpertLora)]
    for lora in divided:
        for parameter in lora.parameters():
            own.append((parameter, parameter.data))
            parameter.data = _gather_rows(parameter.data, ranks)
        lora.experts *= ranks.layout.ep
    try:
        yield
    finally:
        for lora in divided:
            lora.experts //= ranks.layout.ep
        for parameter, data in own:
            # Into the same memory: the optimizer may update a view of it.
            data.copy_(parameter.data.chunk(ranks.layout.ep)[ranks.position("ep")])
            parameter.data = data


def divided_stacks(model: PreTrainedModel, ranks: Ranks) -> dict[str, int]:
    """Name of each parameter with one entry for each expert of this rank -> experts of the layer; adapters too."""
    if ranks.layout.ep == 1:
        return {}
    paths = {module: path for path, module in model.named_modules()}
    found: dict[str, int] = {}
    for module in find_experts(model).values():
        for name, weight in module.named_parameters():
            if name.startswith(f"{LORA}.") or ("." not in name and len(weight) * ranks.layout.ep == module.num_experts):
                found[f"{paths[module]}.{name}"] = module.num_experts
    return found


def _gather_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The entries of all experts, in order of their numbers."""
    group = ranks.part("ep").get_group()
    every = [torch.empty_like(tensor) for _ in range(ranks.layout.ep)]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return torch.cat(every)
