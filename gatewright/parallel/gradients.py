"""Gradients over ranks: summed where weights are replicated, summed and cut up where their state is sharded.

After `backward` a rank has the gradient of its own tokens. A weight that several ranks replicate gets the sum:

    replicated  all-reduce, once a step, as soon as the last micro-batch has made a bucket's gradients
    sharded     reduce-scatter in every micro-batch: a rank keeps its 1/G of the sum, the rest is freed at once; the
                optimizer updates that 1/G, a view into the weight, and an all-gather brings the other ranks' (ZeRO-2)

Sums are made in float32. Weights that FSDP shards are left to FSDP: their gradients arrive as shards by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gatewright.parallel.collectives import all_gather, all_reduce, reduce_scatter
from gatewright.parallel.pieces import Piece, share_elements
from gatewright.parallel.ranks import Ranks

Named = dict[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One trained weight of this rank: the tensor in the model, and what the optimizer updates of it."""

    name: str
    weight: nn.Parameter
    owned: nn.Parameter
    """The weight itself, or a view of those of its elements that this rank updates: never a DTensor."""
    piece: Piece
    """What `owned` is of the whole tensor."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Shares that one collective reduces: of the same groups and of one type."""

    shares: list[Share]
    shard: dist.ProcessGroup | None
    """Ranks that divide the sum among them."""
    copies: list[dist.ProcessGroup]
    """Ranks that all get the sum, one group after the other."""
    unit: int
    """The sum is divided at multiples of so many elements."""
    waiting: set[str] = field(default_factory=set)
    """Names whose gradient this backward pass has yet to make."""

    @property
    def parts(self) -> int:
        """Ranks that divide the sum."""
        return 1 if self.shard is None else dist.get_world_size(self.shard)

    @property
    def part_elements(self) -> list[int]:
        """Of each share: its elements over the ranks, rounded up."""
        return [share_elements(share.weight.numel(), ranks=self.parts, unit=self.unit) for share in self.shares]


class Gradients:
    """The gradients of one rank. A step: clear; micro_batch, backward, finish for each; norm, clip; update; publish."""

    def __init__(self, shares: list[Share], buckets: list[Bucket], ranks: Ranks) -> None:
        self.ranks = ranks
        self.shares = {share.name: share for share in shares}
        self.owned: Named = {share.name: share.owned for share in shares}
        """What the optimizer updates, by the weight's name."""
        self._buckets = buckets
        self._last = False
        self._next = len(buckets)
        for bucket in buckets:
            for share in bucket.shares:
                share.weight.register_post_accumulate_grad_hook(self._made(bucket, share.name))

    def clear(self) -> None:
        """Before the first micro-batch of a step."""
        for share in self.shares.values():
            share.weight.grad = share.owned.grad = None

    def micro_batch(self, *, last: bool) -> None:
        """Before a backward pass; `last` of the step."""
        self._last, self._next = last, 0
        for bucket in self._buckets:
            bucket.waiting = {share.name for share in bucket.shares if share.weight.requires_grad}

    def finish(self) -> None:
        """After a backward pass: reduces what is left, such as weights that got no gradient on this rank."""
        while self._next < len(self._buckets):
            self._reduce_next()
        for share in self.shares.values():
            if isinstance(share.weight, DTensor) and share.weight.grad is not None:
                share.owned.grad = share.weight.grad.to_local()

    def norm(self) -> Tensor:
        """Global L2 norm of the gradients, float32, the same on every rank."""
        if self.ranks.alone:
            return torch.nn.utils.get_total_norm(list(self._grads().values()))
        by_holders: dict[int, list[Tensor]] = {}
        for name, grad in self._grads().items():
            by_holders.setdefault(self.shares[name].piece.holders, []).append(grad)
        squares = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for holders, grads in by_holders.items():
            # What several ranks hold is counted on each of them for its part.
            squares += torch.nn.utils.get_total_norm(grads).double().square() / holders
        return self.ranks.sum(squares).sqrt().float()

    def clip(self, norm: Tensor, largest: float) -> None:
        """Scales the gradients, whose global norm is `norm`, so that it is at most `largest`."""
        grads = list(self._grads().values())
        if grads:
            torch._foreach_mul_(grads, torch.clamp(largest / (norm + 1e-6), max=1.0))

    @torch.no_grad()
    def publish(self) -> None:
        """After the update: brings what other ranks updated of the weights."""
        for bucket in self._buckets:
            if bucket.shard is None:
                continue
            sizes = bucket.part_elements
            owned = zip((share.owned for share in bucket.shares), sizes, strict=True)
            mine = torch.cat([F.pad(elements, (0, size - elements.numel())) for elements, size in owned])
            every = mine.new_empty(bucket.parts * len(mine))
            all_gather(every, mine, group=bucket.shard)
            for share, part in zip(bucket.shares, every.view(bucket.parts, -1).split(sizes, dim=1), strict=True):
                share.weight.view(-1).copy_(part.reshape(-1)[: share.weight.numel()])

    def _grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.owned.items() if p.grad is not None}

    def _made(self, bucket: Bucket, name: str) -> Callable[[nn.Parameter], None]:
        def made(weight: nn.Parameter) -> None:
            bucket.waiting.discard(name)
            # Strictly in order: all ranks must start the collectives of a group in the same one.
            while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
                self._reduce_next()

        return made

    @torch.no_grad()
    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if bucket.shard is None and not self._last:
            return  # gradients of replicated weights add up over the micro-batches first
        sizes = bucket.part_elements
        weights = zip((share.weight for share in bucket.shares), sizes, strict=True)
        summed = torch.cat([_in_parts(weight, parts=bucket.parts, size=size) for weight, size in weights], dim=1)
        if bucket.shard is None:
            summed = summed[0]
        else:
            full, summed = summed.view(-1), summed.new_empty(sum(sizes))
            reduce_scatter(summed, full, group=bucket.shard)
        for group in bucket.copies:
            all_reduce(summed, group=group)
        for share, part in zip(bucket.shares, summed.split(sizes), strict=True):
            _keep(share, part, adds=bucket.shard is not None)


def _in_parts(weight: nn.Parameter, *, parts: int, size: int) -> Tensor:
    """float32 [parts, size]: the weight's gradient, zero where it has none, padded at its end."""
    if weight.grad is None:
        return torch.zeros(parts, size, device=weight.device)
    flat = weight.grad.reshape(-1).float()
    return F.pad(flat, (0, parts * size - len(flat))).view(parts, size)


def _keep(share: Share, part: Tensor, *, adds: bool) -> None:
    """Makes the reduced gradient that of the share's owned elements."""
    if not share.weight.requires_grad:
        return  # frozen on the way, as the router's guard does
    part = part[: share.owned.numel()].view_as(share.owned).to(share.owned.dtype)
    if not adds:
        share.weight.grad = part.clone()
        return
    share.weight.grad = None
    if share.owned.grad is None:
        share.owned.grad = part.clone()
    else:
        share.owned.grad += part
