"""The candidate of mixed CP sizes: within one micro-batch some documents lie whole on a rank, others on several.

Documents come longest first. A micro-batch gets a run of them and a time to keep to, the run's work spread evenly.
What a rank cannot hold, or not in that time, is cut to fill the gaps of as few ranks as possible, of one node where
that can be; the rest lies whole where least is to do. Gaps that stay are filled with shorter documents of later runs.
Runs of several sizes are tried, and of the best one several times; the micro-batch that gets most work done a second
is taken.
"""

import numpy as np
import numpy.typing as npt

from gatewright.packing.arrays import IntArray
from gatewright.packing.schedule_cut import Cutter
from gatewright.packing.schedule_deal import deal, fill_up
from gatewright.packing.schedule_score import Problem, Slot, fastest_s, joined

BoolArray = npt.NDArray[np.bool_]
FILLS: tuple[float, ...] = (0.3, 0.6, 0.8, 0.9, 0.97)
"""Shares of a micro-batch's room that runs fill. Small ones let documents whose attention dominates be spread thin.

All are tried for the first micro-batch, for each further one the best of the one before and its neighbours.
"""
SLACK = 0.02
"""Time beyond an even spread."""
ROUNDING = 1 + 1e-9
"""Of a time that a document must fit into."""
FEW = 256
"""Documents of a last micro-batch that are worth the search for places in the others."""


def mixed(
    problem: Problem, *, slacks: tuple[float, ...] = (SLACK,), cut_late: bool = False, parts: int = 1
) -> list[Slot]:
    """Micro-batches of all documents; of a very large step in `parts` of like lengths, one after another.

    slacks: the first is tried with every run, the others with the best one.
    cut_late: short documents too may be cut while there are shorter ones.
    """
    dealt = [np.arange(part, len(problem.tokens_N), parts) for part in range(parts)]
    return [slot for documents in dealt for slot in fill_all(problem, documents, slacks, cut_late)]


def fill_all(problem: Problem, waiting_W: IntArray, slacks: tuple[float, ...], cut_late: bool) -> list[Slot]:
    """Micro-batches until no document waits."""
    built: list[SlotBuilder] = []
    fills = FILLS
    while len(waiting_W):
        up_to_W = np.cumsum(problem.tokens_N[waiting_W])
        rooms = (int(problem.ranks * problem.capacity * fill) for fill in fills)
        heads = {
            max(1, int(np.searchsorted(up_to_W, room, side="right"))): fill
            for room, fill in zip(rooms, fills, strict=True)
        }
        tried = {head: build(problem, waiting_W, head, slacks[0], cut_late) for head in heads}
        head = max(tried, key=lambda head: tried[head].work_per_s())
        others = [build(problem, waiting_W, head, slack, cut_late) for slack in slacks[1:]]
        slot = max([tried[head], *others], key=SlotBuilder.work_per_s)
        built.append(slot)
        best = FILLS.index(heads[head])
        fills = FILLS[max(best - 1, 0) : best + 2]
        waiting_W = waiting_W[~slot.holds()[waiting_W]]
    while len(built) > 1 and dissolved(built[-1], built[:-1]):
        built.pop()
    return [joined(slot.parts) for slot in built]


def build(problem: Problem, waiting_W: IntArray, head: int, slack: float, cut_late: bool) -> "SlotBuilder":
    """A micro-batch of the first `head` documents, or most of them, and shorter ones for its gaps."""
    limit_s = spread_evenly_s(problem, waiting_W[:head]) * (1 + slack)
    slot = SlotBuilder(problem, max(limit_s, fastest_s(problem, int(problem.tokens_N[waiting_W[0]])) * ROUNDING))
    late_D = slot.place(waiting_W[:head])
    if cut_late or head == len(waiting_W):
        slot.cut(late_D)
    slot.top_up(waiting_W[head:])
    return slot


def spread_evenly_s(problem: Problem, documents_D: IntArray) -> float:
    """Seconds of each rank if the work, and what cutting the longest of the documents adds to it, came out even."""
    costs, tokens_D, works_D = problem.costs, problem.tokens_N[documents_D], problem.works_N[documents_D]
    even = works_D.sum() / problem.ranks
    cut_D = (tokens_D > problem.capacity) | (works_D > even)
    tokens_C = tokens_D[cut_D]
    ranks_C = np.maximum(-(-tokens_C // problem.capacity), np.ceil(works_D[cut_D] / even))
    ranks_C = np.minimum(ranks_C, problem.ranks)
    exchange_C = np.where(ranks_C <= costs.ranks_per_node, costs.near_s, costs.far_s)
    added_C = ranks_C * (costs.split_s(tokens_C) + costs.hop_s) + (ranks_C - 1) * tokens_C * exchange_C
    return float(even + added_C.sum() / problem.ranks)


class SlotBuilder:
    """A micro-batch that is being filled, all ranks of it."""

    def __init__(self, problem: Problem, limit_s: float) -> None:
        self.problem = problem
        self.limit_s = limit_s
        self.load_s_R = np.zeros(problem.ranks)
        self.room_R = np.full(problem.ranks, problem.capacity)
        """Tokens that each rank can still hold."""
        self.parts: list[Slot] = []
        self.work_s = 0.0
        """Of all that it holds."""

    def holds(self) -> BoolArray:
        """[documents] Whether it holds each."""
        held_N = np.zeros(len(self.problem.tokens_N), np.bool_)
        for part in self.parts:
            held_N[part.documents_P] = True
        return held_N

    def work_per_s(self) -> float:
        """Seconds of work that a second of this micro-batch gets done."""
        return float(self.work_s / (self.load_s_R.max() + self.problem.costs.slot_s))

    def place(self, documents_D: IntArray) -> IntArray:
        """As many of them as keep to the time; returns those that would lie whole on a rank, but later than that."""
        tokens_D, works_D = self.problem.tokens_N[documents_D], self.problem.works_N[documents_D]
        fits_D = (tokens_D <= self.problem.capacity) & (works_D <= self.limit_s)
        self.cut(documents_D[~fits_D])
        bins_D = deal(works_D[fits_D], tokens_D[fits_D], self.load_s_R, self.room_R, self.limit_s)
        self.hold(documents_D[fits_D], bins_D)
        return documents_D[fits_D][bins_D < 0]

    def top_up(self, documents_D: IntArray) -> None:
        """Fill the gap of each rank below the slowest with the longest of these documents that fit."""
        works_D, tokens_D = self.problem.works_N[documents_D], self.problem.tokens_N[documents_D]
        slowest_s = float(self.load_s_R.max())
        self.hold(documents_D, fill_up(works_D, tokens_D, self.load_s_R, self.room_R, slowest_s))

    def hold(self, documents_D: IntArray, ranks_D: IntArray) -> None:
        """Note documents that lie whole on ranks, but for those on rank -1."""
        held_D = ranks_D >= 0
        held = documents_D[held_D]
        self.parts.append(Slot(held, ranks_D[held_D], self.problem.tokens_N[held]))
        self.work_s += float(self.problem.works_N[held].sum())

    def cut(self, documents_D: IntArray) -> None:
        """Those of them that find a place within the limit."""
        if not len(documents_D):
            return
        cutter = Cutter(self.problem, self.limit_s, self.load_s_R, self.room_R)
        cutter.cut(documents_D)
        self.load_s_R, self.room_R = np.array(cutter.load_s), np.array(cutter.room)
        self.parts.append(cutter.made())
        self.work_s += cutter.work_s


def dissolved(last: SlotBuilder, others: list[SlotBuilder]) -> bool:
    """Whether all documents of a micro-batch found a place in others that costs less than it did; they are moved."""
    problem, documents_D = last.problem, np.flatnonzero(last.holds())
    if len(documents_D) > FEW:
        return False
    load_SR = np.stack([slot.load_s_R for slot in others])
    room_SR = np.stack([slot.room_R for slot in others])
    gain = last.load_s_R.max() + problem.costs.slot_s
    places = []
    for tokens, work in zip(problem.tokens_N[documents_D], problem.works_N[documents_D], strict=True):
        open_SR = np.where(room_SR >= tokens, load_SR, np.inf)
        more_S = np.maximum(0.0, open_SR.min(axis=1) + work - load_SR.max(axis=1))
        number = int(more_S.argmin())
        gain -= more_S[number]
        if gain <= 0:
            return False
        rank = int(open_SR[number].argmin())
        load_SR[number, rank] += work
        room_SR[number, rank] -= tokens
        places.append((number, rank))
    numbers_D, ranks_D = np.array(places).T
    for number, slot in enumerate(others):
        slot.hold(documents_D, np.where(numbers_D == number, ranks_D, -1))
        slot.load_s_R, slot.room_R = load_SR[number], room_SR[number]
    return True
