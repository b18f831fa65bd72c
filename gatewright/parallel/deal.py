"""Experts dealt to ranks in another order than their numbers': their weights are exchanged once, after loading.

The model's numbering stays: routers, counts and files know nothing of where an expert lies. A rank's stacks hold the
experts of its positions in the order, and rows of tokens are sorted by position (model/experts.py).

Shapes: N entries of a stack on this rank, S of them sent or received.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from gatewright.model.experts import find_experts, hold
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.quantized_divided import DividedWeight
from gatewright.parallel.collect import own_stacks
from gatewright.parallel.ranks import SHARD, Ranks
from gatewright.spec.errors import RunFileError


@torch.no_grad()
def deal_experts(model: PreTrainedModel, orders: Mapping[int, Sequence[int]], ranks: Ranks) -> None:
    """Gives each rank the experts of its positions; layer -> the expert at each position. All ranks must call it.

    To be called once, with the experts in the order of their numbers and no adapters on them. Beside a stack there are
    for a moment two more of its size.
    """
    for layer, experts in find_experts(model).items():
        if tuple(orders[layer]) == experts.gatewright_order:
            continue
        for name, stack in own_stacks(experts).items():
            for rows, first, group in _parts(stack, ranks, name=f"{name} of layer {layer}"):
                _exchange(rows, orders[layer], first=first, group=group)
        count = len(experts.gatewright_held)
        hold(experts, orders[layer], first=ranks.position("ep") * count, count=count)


def _parts(stack: nn.Parameter, ranks: Ranks, *, name: str) -> list[tuple[Tensor, int, dist.ProcessGroup]]:
    """This rank's entries of a stack, the position of the first, and the ranks that have the others, each once.

    Of a stack in few bits, those of each of its packed tensors. Raises RunFileError where ranks have parts of experts.
    """
    if isinstance(stack, DTensor):
        _, (first, *_) = compute_local_shape_and_global_offset(stack.shape, stack.device_mesh, stack.placements)
        return [(stack.to_local(), first, ranks.part(SHARD).get_group())]
    first = ranks.position("ep") * len(stack)
    if isinstance(stack, DividedWeight):
        if stack.own_EB is None:
            raise RunFileError(
                f"router.placement: {name} has {len(stack)} experts in few bits on {stack.shares.count} ranks that "
                "divide them, so that a rank has parts of experts; set placement: contiguous, or parallel.dense: zero2"
            )
        first += stack.shares.position * len(stack.own_EB)
        return [(stack.own_EB, first, ranks.part(SHARD).get_group())]
    group = ranks.part("ep").get_group()
    if isinstance(stack, QuantizedWeight):
        # As bytes: not every operation is there for 8-bit floats.
        return [(part.view(len(part), -1).view(torch.uint8), first, group) for part in stack.parts.values()]
    return [(stack.data, first, group)]


def _exchange(own_N: Tensor, order: Sequence[int], *, first: int, group: dist.ProcessGroup) -> None:
    """Replaces in place the entries of the experts from number `first` on by those of the positions from it on."""
    mine = torch.tensor([first, len(own_N)], device=own_N.device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    spans = [range(begin, begin + count) for begin, count in (span.tolist() for span in every)]
    here = range(first, first + len(own_N))
    # By rank, then by position, on both sides.
    sent = [[order[position] - first for position in span if order[position] in here] for span in spans]
    received = [[position - first for position in here if order[position] in span] for span in spans]
    sent_S = own_N[_flat(sent, own_N)]
    received_S = torch.empty_like(sent_S)
    dist.all_to_all_single(received_S, sent_S, [len(r) for r in received], [len(s) for s in sent], group=group)
    own_N[_flat(received, own_N)] = received_S


def _flat(parts: list[list[int]], like: Tensor) -> Tensor:
    return torch.tensor([entry for part in parts for entry in part], dtype=torch.int64, device=like.device)
