"""Capacity of experts: which assignments of a micro-batch are kept where an expert, or a rank of experts, is full."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """C = ceil(factor · S / pools) of a micro-batch's S assignments for each pool of experts (Switch Transformer)."""

    factor: float
    experts_per_pool: int
    """1: each expert has a capacity of its own. E / ep: the experts of a rank share one."""
    drop: Literal["probs", "position"]
    """Whether the smallest routing weights go first, or the last tokens of the micro-batch."""


def kept(expert_S: Tensor, weight_S: Tensor, *, experts: int, capacity: Capacity) -> Tensor:
    """bool [S]: which of the assignments (their expert, their routing weight) have room."""
    pool_S = expert_S // capacity.experts_per_pool
    pools = experts // capacity.experts_per_pool
    room = math.ceil(capacity.factor * len(expert_S) / pools)
    # Two stable sorts: by priority, then by pool; a row's place within its pool is its place less the pool's start.
    first_S = torch.arange(len(expert_S), device=expert_S.device)
    if capacity.drop == "probs":
        first_S = weight_S.detach().argsort(descending=True, stable=True)
    order_S = first_S[pool_S[first_S].argsort(stable=True)]
    counts_P = torch.bincount(pool_S, minlength=pools)
    starts_P = counts_P.cumsum(0) - counts_P
    place_S = torch.arange(len(expert_S), device=expert_S.device) - starts_P[pool_S[order_S]]
    keep_S = torch.empty_like(place_S, dtype=torch.bool)
    keep_S[order_S] = place_S < room
    return keep_S
