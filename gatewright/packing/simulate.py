"""Simulates steps of a data set on many ranks: the schedule of each, and what every rank does in it and how long."""

import time
from collections.abc import Iterator

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.cost import CostModel
from gatewright.packing.schedule import MicroBatch, Schedule, schedule
from gatewright.spec.schedule import RankTime, SlotTime, StepReport


def simulate(
    lengths_N: IntArray, *, ranks: int, capacity: int, costs: CostModel, tokens_per_step: int, steps: int
) -> tuple[int, list[StepReport]]:
    """How many steps the documents make, and reports of at most `steps` of them, evenly spread.

    A step takes documents in their order until it holds `tokens_per_step` tokens. Raises ValueError for a document
    that all ranks together cannot hold.
    """
    bounds = list(step_bounds(lengths_N, tokens_per_step))
    chosen = np.unique(np.linspace(0, len(bounds) - 1, num=min(steps, len(bounds))).round().astype(int))
    reports = []
    for start, end in (bounds[k] for k in chosen.tolist()):
        reports.append(step_report(lengths_N[start:end], ranks=ranks, capacity=capacity, costs=costs))
    return len(bounds), reports


def step_bounds(lengths_N: IntArray, tokens_per_step: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the documents of each step; the last step may hold fewer tokens."""
    up_to = np.cumsum(lengths_N)
    start = 0
    while start < len(lengths_N):
        held = int(up_to[start - 1]) if start else 0
        end = max(int(np.searchsorted(up_to, held + tokens_per_step, side="right")), start + 1)
        yield start, end
        start = end


def step_report(lengths_N: IntArray, *, ranks: int, capacity: int, costs: CostModel) -> StepReport:
    begun = time.process_time()
    made = schedule(lengths_N, ranks=ranks, capacity=capacity, costs=costs)
    solver_s = time.process_time() - begun
    tokens = lengths_N.tolist()
    slots = tuple(slot_time(micro_batch, tokens, costs) for micro_batch in made.micro_batches)
    return StepReport(
        documents=len(tokens),
        tokens=sum(tokens),
        strategy=made.strategy,
        step_s=made.step_s,
        bound_s=made.bound_s,
        candidates=made.candidates,
        exchanged_bytes=exchanged_tokens(made, tokens) * costs.exchange_bytes,
        solver_s=solver_s,
        slots=slots,
    )


def slot_time(micro_batch: MicroBatch, tokens: list[int], costs: CostModel) -> SlotTime:
    """What the cost model says of each rank's slices, kind by kind."""
    ranks = []
    for rank, slices in enumerate(micro_batch.slices):
        held: dict[int, int] = {}
        for document, start, end in slices:
            held[document] = held.get(document, 0) + end - start
        ranks.append(rank_time(micro_batch, rank, held, tokens, costs))
    return SlotTime(
        duration_s=max(rank.busy_s for rank in ranks) + costs.slot_s,
        ranks=tuple(ranks),
        tokens=sum(end - start for slices in micro_batch.slices for _, start, end in slices),
        cut_documents=len(micro_batch.groups),
        widest=max((len(group) for group in micro_batch.groups.values()), default=1),
    )


def rank_time(
    micro_batch: MicroBatch, rank: int, held: dict[int, int], tokens: list[int], costs: CostModel
) -> RankTime:
    attention = exchange = 0.0
    widest = 1
    for document, share in held.items():
        length = tokens[document]
        group = micro_batch.groups.get(document)
        if group is None:
            attention += costs.attention_s * length * (length + costs.tile_tokens)
            continue
        assert rank in group
        attention += costs.attention_s * length * share + costs.split_s(length)
        exchange += (length - share) * costs.exchange_s(group[0], group[-1])
        widest = max(widest, len(group))
    return RankTime(
        tokens_s=costs.token_s * sum(held.values()),
        attention_s=attention,
        exchange_s=exchange + costs.hop_s * (widest - 1),
    )


def exchanged_tokens(made: Schedule, tokens: list[int]) -> int:
    """Tokens whose keys and values ranks receive: of each cut document, each of its ranks those it does not hold."""
    return sum(
        (len(group) - 1) * tokens[document]
        for micro_batch in made.micro_batches
        for document, group in micro_batch.groups.items()
    )
