"""Placement: which experts share an expert-parallel rank, so that the busiest rank has as little as can be.

A placement is a permutation of a layer's experts, equally many a rank: exact, and undone by its inverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gatewright.spec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each expert lies. Rank r of `ep` holds positions r·E/ep … (r + 1)·E/ep − 1."""

    ep: int
    order: list[list[int]]
    """[MoE layer][position]: the expert that lies there. New weights are old ones at these indices."""

    def inverse(self) -> list[list[int]]:
        """[MoE layer][expert]: its position. Old weights are new ones at these indices."""
        return [_inverse(order) for order in self.order]


def contiguous(*, layers: int, experts: int, ep: int) -> Placement:
    """Experts in their own order. Raises UserError when `ep` does not divide them."""
    _check(experts, ep)
    return Placement(ep=ep, order=[list(range(experts)) for _ in range(layers)])


def place(loads_by_layer: Sequence[Sequence[float]], *, ep: int) -> Placement:
    """The placement for these loads, [MoE layer][expert] in any unit, each layer by itself.

    Heaviest expert first onto the lightest rank that has room (LPT, Graham 1969, with equal numbers), then swaps of
    two experts as long as one takes load off the busiest rank. A layer where this gains nothing stays contiguous.
    Raises UserError when `ep` does not divide the experts.
    """
    order = []
    for loads in loads_by_layer:
        _check(len(loads), ep)
        ranks = _swap(_longest_first(loads, ep), loads)
        straight = list(range(len(loads)))
        # In order of the experts within a rank and of the first experts of the ranks: one text for one placement.
        spread = [expert for rank in sorted(sorted(rank) for rank in ranks) for expert in rank]
        better = _worst(spread, loads, ep) < _worst(straight, loads, ep)
        order.append(spread if better else straight)
    return Placement(ep=ep, order=order)


def worst_rank_loads(placement: Placement, loads_by_layer: Sequence[Sequence[float]]) -> list[float]:
    """Load of each layer's busiest rank over the mean of its ranks: 1 is even, `ep` is all on one. 0 without load."""
    worst = []
    for order, loads in zip(placement.order, loads_by_layer, strict=True):
        total = sum(loads)
        worst.append(_worst(order, loads, placement.ep) * placement.ep / total if total else 0.0)
    return worst


def _check(experts: int, ep: int) -> None:
    if ep < 1 or experts % ep:
        fitting = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
        raise UserError(f"ep = {ep} does not divide {experts} experts; use one of {fitting}")


def _longest_first(loads: Sequence[float], ep: int) -> list[list[int]]:
    room = len(loads) // ep
    ranks: list[list[int]] = [[] for _ in range(ep)]
    carried = [0.0] * ep
    for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
        rank = min((r for r in range(ep) if len(ranks[r]) < room), key=lambda r: (carried[r], r))
        ranks[rank].append(expert)
        carried[rank] += loads[expert]
    return ranks


def _swap(ranks: list[list[int]], loads: Sequence[float]) -> list[list[int]]:
    """Swaps an expert of the busiest rank for a lighter one elsewhere while that lowers the larger of the two loads."""
    ranks = [list(rank) for rank in ranks]
    while True:
        carried = [sum(loads[expert] for expert in rank) for rank in ranks]
        busiest = max(range(len(ranks)), key=carried.__getitem__)
        best, swap = carried[busiest], None
        for other in range(len(ranks)):
            for i, mine in enumerate(ranks[busiest]):
                for j, theirs in enumerate(ranks[other]):
                    moved = loads[mine] - loads[theirs]
                    peak = max(carried[busiest] - moved, carried[other] + moved)
                    if other != busiest and moved > 0 and peak < best * (1 - 1e-12):
                        best, swap = peak, (i, other, j)
        if swap is None:
            return ranks
        i, other, j = swap
        ranks[busiest][i], ranks[other][j] = ranks[other][j], ranks[busiest][i]


def _worst(order: Sequence[int], loads: Sequence[float], ep: int) -> float:
    size = len(order) // ep
    return max(sum(loads[expert] for expert in order[rank * size : (rank + 1) * size]) for rank in range(ep))


def _inverse(order: Sequence[int]) -> list[int]:
    position = [0] * len(order)
    for place_, expert in enumerate(order):
        position[expert] = place_
    return position
