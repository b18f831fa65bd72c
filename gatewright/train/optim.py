"""The optimizer, the course of the learning rate, and the optimizer's state as plain named tensors."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gatewright.parallel.pieces import Piece
from gatewright.spec import run as spec
from gatewright.spec.eight_bit import BLOCK_8BIT
from gatewright.spec.errors import CheckpointError
from gatewright.train.eight_bit import IN_BLOCKS, adamw_8bit, in_blocks

Named = dict[str, nn.Parameter]
ROUTER = "router"
"""Key of a parameter group: whether it is the router's."""


def trainable(model: nn.Module) -> Named:
    """Name -> parameter that trains, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def together(train: spec.Train) -> int:
    """Elements of a weight that ranks should not cut apart: those that the optimizer's state has in one block."""
    return BLOCK_8BIT if train.optimizer == "adamw8bit" else 1


def build_optimizer(
    parameters: Named, train: spec.Train, *, router: Collection[str] = (), pieces: Mapping[str, Piece] | None = None
) -> torch.optim.Optimizer:
    """AdamW: matrices with weight decay, norms and biases without, and apart the parameters named in `router`.

    `pieces`: what each parameter is of a whole weight, where a rank updates only part of them. One of no elements is
    left out: it may have no gradient, and would fall behind in steps.
    """
    if pieces is None:
        pieces = {n: Piece(shape=tuple(p.shape), begin=0, end=p.numel()) for n, p in parameters.items()}
    eight_bit = train.optimizer == "adamw8bit"
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if not parameter.numel():
            continue
        is_matrix = name not in router and len(pieces[name].shape) >= 2
        key = (name in router, not is_matrix, eight_bit and in_blocks(pieces[name]))
        groups.setdefault(key, []).append(parameter)
    settings = [
        {"params": group, "weight_decay": 0.0 if bare else train.weight_decay, ROUTER: is_router, IN_BLOCKS: blocks}
        for (is_router, bare, blocks), group in sorted(groups.items(), key=lambda item: item[0])
    ]
    settings = settings or [{"params": [], ROUTER: False, IN_BLOCKS: False}]  # a rank may have nothing to update
    if eight_bit:
        return adamw_8bit(settings, train)
    return torch.optim.AdamW(settings, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def learning_rate(step: int, *, steps: int, train: spec.Train) -> float:
    """Learning rate of step `step` (counted from 0) of `steps`.

    Linear warm-up to train.lr over warmup_steps, then the schedule down to min_lr_fraction · lr:
    cosine and linear over all that is left, wsd over the last decay_fraction of the run, constant never.
    """
    floor = train.min_lr_fraction
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    begin = train.warmup_steps
    if train.schedule == "wsd":
        begin = max(begin, steps - math.ceil(train.decay_fraction * steps))
    if step < begin:
        return train.lr
    progress = (step - begin) / max(1, steps - begin)
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0 - progress
    return train.lr * (floor + (1.0 - floor) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, *, router_scale: float = 1.0) -> None:
    """`lr` for every group, `lr · router_scale` for the router's."""
    for group in optimizer.param_groups:
        group["lr"] = lr * router_scale if group[ROUTER] else lr


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Named) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>/<key>` -> the tensor itself; plain integers become float64 scalars.

    What codes of 8 bits stand for is left out: all parameters have it in common.
    """
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key.startswith("qmap"):
                continue
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            tensors[f"{name}/{key}"] = tensor.detach()
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, parameters: Named, tensors: dict[str, Tensor]) -> None:
    """Puts back what optimizer_tensors took, to the bit. Raises CheckpointError for a state of other parameters."""
    states: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        if name not in states:
            raise CheckpointError(f"optimizer state of {name}, which this run does not train")
        is_number = tensor.dtype == torch.float64 and tensor.dim() == 0
        states[name][key] = int(tensor.item()) if is_number else tensor.to(parameters[name].device, copy=True)
    for name, parameter in parameters.items():
        optimizer.state.pop(parameter, None)
        if states[name]:
            optimizer.state[parameter] = states[name]
