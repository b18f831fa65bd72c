"""The candidate of mixed CP sizes: within one micro-batch some documents lie whole on a rank, others on several.

Documents come longest first. A micro-batch gets a run of them and a time to keep to, the run's work spread evenly.
What a rank cannot hold, or not in that time, is cut to fill the gaps of as few ranks as possible, of one node where
that can be; the rest lies whole where least is to do. Gaps that stay are filled with shorter documents of later runs.
Runs of several sizes and times are tried; the micro-batch that gets most work done a second is taken.
"""

from bisect import bisect_left
from heapq import heapify, heappop, heappush

from gatewright.packing.schedule_score import Placement, Problem, Slot, alone_s, even_shares

FILLS: tuple[float, ...] = (0.3, 0.6, 0.8, 0.9, 0.97)
"""Shares of a micro-batch's room that runs fill. Small ones let documents whose attention dominates be spread thin.

All are tried for the first micro-batch, for each further one the best of the one before and its neighbours.
"""
SLACKS = (0.03, 0.0, 0.08)
"""Time beyond an even spread. The first is tried with every run, the others with the best one."""
FEW = 256
"""Documents of a last micro-batch that are worth the search for places in the others."""


def mixed(problem: Problem, *, parts: int = 1) -> list[Slot]:
    """Micro-batches of all documents; of a very large step in `parts` of like lengths, one after another."""
    dealt = [problem.only(problem.longest_first[part::parts]) for part in range(parts)]
    return [slot for part in dealt if part.longest_first for slot in fill_all(part)]


def fill_all(problem: Problem) -> list[Slot]:
    """Micro-batches until no document waits."""
    waiting, room = problem.longest_first, problem.ranks * problem.capacity
    built: list[SlotBuilder] = []
    fills = FILLS
    while waiting:
        heads = {leading(problem, waiting, int(room * fill)): fill for fill in fills}
        tried = {head: build(problem, waiting, head, SLACKS[0]) for head in heads}
        head = max(tried, key=lambda head: tried[head].work_per_s())
        best = FILLS.index(heads[head])
        fills = FILLS[max(best - 1, 0) : best + 2]
        others = [build(problem, waiting, head, slack) for slack in SLACKS[1:]]
        slot = max([tried[head], *others], key=SlotBuilder.work_per_s)
        built.append(slot)
        waiting = [document for document in waiting if document not in slot.placed]
    while len(built) > 1 and dissolved(built[-1], built[:-1]):
        built.pop()
    return [slot.placements() for slot in built]


def leading(problem: Problem, documents: list[int], room: int) -> int:
    """How many documents from the front fit into `room` tokens; at least one."""
    for count, document in enumerate(documents):
        room -= problem.tokens[document]
        if room < 0:
            return max(count, 1)
    return len(documents)


def build(problem: Problem, waiting: list[int], head: int, slack: float) -> "SlotBuilder":
    """A micro-batch of the first `head` documents, or most of them, and shorter ones for its gaps."""
    slot = SlotBuilder(problem, spread_evenly_s(problem, waiting[:head]) * (1 + slack))
    slot.place(waiting[:head])
    slot.top_up(waiting[head:])
    return slot


def spread_evenly_s(problem: Problem, documents: list[int]) -> float:
    """Seconds of each rank if the work, and what cutting the longest of the documents adds to it, came out even."""
    costs, work = problem.costs, problem.work_s
    total = sum(work[document] for document in documents)
    even = total / problem.ranks
    for document in documents:
        tokens = problem.tokens[document]
        if tokens <= problem.capacity and work[document] <= even:
            break
        ranks = min(max(-(-tokens // problem.capacity), -int(-work[document] // even)), problem.ranks)
        exchange = costs.near_s if ranks <= costs.ranks_per_node else costs.far_s
        total += ranks * (costs.split_s(tokens) + costs.hop_s) + (ranks - 1) * tokens * exchange
    return total / problem.ranks


class SlotBuilder:
    """A micro-batch that is being filled, all ranks of it."""

    def __init__(self, problem: Problem, limit_s: float) -> None:
        self.problem = problem
        self.limit_s = limit_s
        self.load_s = [0.0] * problem.ranks
        self.room = [problem.capacity] * problem.ranks
        """Tokens that each rank can still hold."""
        self.placed: dict[int, dict[int, int]] = {}
        """Tokens of each document on each of its ranks."""
        per_node = problem.costs.ranks_per_node
        self.nodes = [range(at, min(at + per_node, problem.ranks)) for at in range(0, problem.ranks, per_node)]

    def placements(self) -> Slot:
        ordered = {document: dict(sorted(shares.items())) for document, shares in self.placed.items()}
        return [Placement(document, tuple(shares), tuple(shares.values())) for document, shares in ordered.items()]

    def work_per_s(self) -> float:
        """Seconds of work that a second of this micro-batch gets done."""
        work = sum(self.problem.work_s[document] for document in self.placed)
        return work / (max(self.load_s) + self.problem.costs.slot_s)

    def place(self, documents: list[int]) -> None:
        """As many of them as keep to the time; the first one in any case."""
        whole = []
        for document in documents:
            if self.fits_a_rank(document):
                whole.append(document)
            elif not self.cut(document) and not self.placed:
                self.spread(document)
        for document in self.place_whole(whole):
            self.cut(document)
        if not self.placed:
            self.spread(documents[0])

    def fits_a_rank(self, document: int) -> bool:
        problem = self.problem
        return problem.tokens[document] <= problem.capacity and problem.work_s[document] <= self.limit_s

    def hold(self, document: int, shares: dict[int, int]) -> None:
        """Put a document on ranks, so many tokens on each."""
        costs, tokens = self.problem.costs, self.problem.tokens[document]
        self.placed[document] = shares
        if len(shares) == 1:
            (rank,) = shares
            self.room[rank] -= tokens
            self.load_s[rank] += self.problem.work_s[document]
            return
        exchange = costs.exchange_s(min(shares), max(shares))
        for rank, share in shares.items():
            self.room[rank] -= share
            self.load_s[rank] += costs.share_s(tokens, share, exchange) + costs.hop_s

    def place_whole(self, documents: list[int]) -> list[int]:
        """Each where least is to do among ranks with room; returns those that would take longer than the limit."""
        least = [(load, rank) for rank, load in enumerate(self.load_s)]
        heapify(least)
        late = []
        for document in documents:
            tokens, work = self.problem.tokens[document], self.problem.work_s[document]
            full = []
            while least and self.room[least[0][1]] < tokens:
                full.append(heappop(least))
            if least and least[0][0] + work <= self.limit_s:
                _, rank = heappop(least)
                self.hold(document, {rank: tokens})
                heappush(least, (self.load_s[rank], rank))
            else:
                late.append(document)
            for entry in full:
                heappush(least, entry)
        return late

    def cut(self, document: int) -> bool:
        """Onto as few ranks as hold it within the limit: of the node with least to spare, else of several nodes."""
        tokens, near_s = self.problem.tokens[document], self.problem.costs.near_s
        best: tuple[int, int, dict[int, int]] | None = None
        for node in self.nodes:
            gaps = self.gaps(document, node, near_s)
            spare = sum(gap for gap, _ in gaps)
            if spare >= tokens:
                shares = fill_gaps(gaps, tokens)
                if best is None or (len(shares), spare) < best[:2]:
                    best = len(shares), spare, shares
                if self.untouched(node):
                    break  # the nodes behind it are as empty
        shares = best[2] if best else fill_gaps(self.far_gaps(document), tokens)
        if shares:
            self.hold(document, shares)
        return bool(shares)

    def untouched(self, node: range) -> bool:
        return not any(self.load_s[node.start : node.stop])

    def gaps(self, document: int, node: range, exchange_s: float) -> list[tuple[int, int]]:
        """(tokens of the document that fit within the limit, rank) of ranks of a node that have any, most first."""
        costs, tokens = self.problem.costs, self.problem.tokens[document]
        left_s = self.limit_s - costs.split_s(tokens) - tokens * exchange_s - costs.hop_s
        loads = self.load_s[node.start : node.stop]
        if min(loads) >= left_s:
            return []
        each_s, room = max(costs.rate(tokens) - exchange_s, 1e-12), self.room
        gaps = []
        for rank, load in zip(node, loads, strict=True):
            gap = int((left_s - load) / each_s)
            if gap > room[rank]:
                gap = room[rank]
            if gap > 0:
                gaps.append((gap, rank))
        gaps.sort(reverse=True)
        return gaps

    def far_gaps(self, document: int) -> list[tuple[int, int]]:
        """Of the fewest nodes that hold the document together."""
        by_node = [self.gaps(document, node, self.problem.costs.far_s) for node in self.nodes]
        by_node.sort(key=lambda gaps: -sum(gap for gap, _ in gaps))
        chosen: list[tuple[int, int]] = []
        for gaps in by_node:
            chosen += gaps
            if sum(gap for gap, _ in chosen) >= self.problem.tokens[document]:
                break
        return sorted(chosen, reverse=True)

    def spread(self, document: int) -> None:
        """However long it takes, on as many ranks from the first on as make it fastest; all are empty."""
        problem, tokens = self.problem, self.problem.tokens[document]
        widths = range(-(-tokens // problem.capacity), min(problem.ranks, tokens) + 1)
        width = min(widths, key=lambda ranks: alone_s(problem, tokens, ranks))
        self.hold(document, dict(enumerate(even_shares(tokens, width))))
        self.limit_s = max(self.limit_s, *self.load_s)

    def top_up(self, documents: list[int]) -> None:
        """Fill the gap of each rank below the slowest with the longest of these documents that fit."""
        slowest, left = max(self.load_s), list(documents)
        work, tokens = self.problem.work_s, self.problem.tokens
        for rank in sorted(range(self.problem.ranks), key=self.load_s.__getitem__):
            at = 0
            while at < len(left):
                at = bisect_left(left, self.load_s[rank] - slowest, lo=at, key=lambda document: -work[document])
                at = bisect_left(left, -self.room[rank], lo=at, key=lambda document: -tokens[document])
                if at < len(left):
                    document = left.pop(at)
                    self.hold(document, {rank: tokens[document]})


def fill_gaps(gaps: list[tuple[int, int]], tokens: int) -> dict[int, int]:
    """Tokens of each rank: the largest gaps are filled, the last piece goes into the smallest that holds it.

    Empty when all gaps together are too small.
    """
    shares: dict[int, int] = {}
    for at, (gap, rank) in enumerate(gaps):
        if gap >= tokens:
            last = next(other for held, other in reversed(gaps[at:]) if held >= tokens)
            return shares | {last: tokens}
        shares[rank] = gap
        tokens -= gap
    return {}


def dissolved(last: SlotBuilder, others: list[SlotBuilder]) -> bool:
    """Whether all documents of a micro-batch found a place in others that costs less than it did; they are moved."""
    problem = last.problem
    if len(last.placed) > FEW:
        return False
    loads, rooms = [list(slot.load_s) for slot in others], [list(slot.room) for slot in others]
    gain = max(last.load_s) + problem.costs.slot_s
    moves = []
    for document in last.placed:
        tokens, work = problem.tokens[document], problem.work_s[document]
        best: tuple[float, int, int] | None = None
        for number, (load, room) in enumerate(zip(loads, rooms, strict=True)):
            rank = min(
                (rank for rank in range(problem.ranks) if room[rank] >= tokens), key=load.__getitem__, default=-1
            )
            if rank >= 0:
                more = max(0.0, load[rank] + work - max(load))
                best = min(best or (more, number, rank), (more, number, rank))
        if best is None or gain <= best[0]:
            return False
        gain -= best[0]
        _, number, rank = best
        loads[number][rank] += work
        rooms[number][rank] -= tokens
        moves.append((document, number, rank))
    for document, number, rank in moves:
        others[number].hold(document, {rank: problem.tokens[document]})
    return True
