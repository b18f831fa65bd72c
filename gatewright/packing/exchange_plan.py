"""The part of a rank in the exchange that was chosen for a micro-batch."""

from collections.abc import Callable, Sequence

from gatewright.packing.exchange import Exchange, plan_exchange
from gatewright.packing.exchange_cost import Name
from gatewright.packing.exchange_gather import Gather, cut_documents, plan_gather
from gatewright.packing.exchange_heads import HeadExchange, plan_heads
from gatewright.packing.exchange_ring import RingExchange, plan_ring
from gatewright.packing.schedule import Slice

Plan = Exchange | Gather | HeadExchange | RingExchange
IN_GROUP: dict[str, Callable[[Sequence[Sequence[Slice]], int], Gather | HeadExchange | RingExchange]] = {
    "gathered": plan_gather,
    "heads": plan_heads,
    "ring": plan_ring,
}


def plan(slices: Sequence[Sequence[Slice]], rank: int, chosen: tuple[Name, int] | None) -> Plan | None:
    """The part of `rank` of all ranks, in an exchange over groups of that size; None where its group cuts nothing."""
    if chosen is None:
        return None
    name, size = chosen
    if name == "moved":
        return plan_exchange(slices, rank)
    group = slices[rank - rank % size : rank - rank % size + size]
    return IN_GROUP[name](group, rank % size) if cut_documents(group) else None
