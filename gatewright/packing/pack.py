"""Put documents into packs: in bulk, or by best-fit-decreasing on the histogram of lengths; two proved lower bounds.

lengths      5 3 3 2 2 1        capacity 8
packs        [5 3] [3 2 2 1]    order = [0 2 1 3 4 5], offsets = [0 2 6]
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import neg

import numpy as np
import numpy.typing as npt

from gatewright.packing.arrays import IntArray
from gatewright.packing.pack_bulk import fill_in_bulk, stable_argsort
from gatewright.packing.pack_exact import Placed, fill_exactly

NEAR = 0.0005
"""Above the lower bound, in packs: what is not worth the search for fewer."""
Seed = int | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Every document in exactly one pack; pack k holds documents `order[offsets[k]:offsets[k + 1]]`."""

    order: IntArray
    """[documents] indices into the lengths that were packed, pack after pack, longest first within one."""
    offsets: IntArray
    """[packs + 1] where each pack begins in `order`."""
    capacity: int
    """Tokens a pack can hold."""
    tokens: int
    """Tokens of all documents."""
    lower_bound: int
    """No packing of these lengths can use fewer packs: the largest bound known."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> IntArray:
        return self.order[self.offsets[k] : self.offsets[k + 1]]

    @property
    def fill(self) -> float:
        """Share of the packs' room that holds tokens: 0 to 1; 1 when there is nothing to pack."""
        return self.tokens / (len(self) * self.capacity) if len(self) else 1.0


def pack(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    seed: Seed | None = None,
    max_documents: int | None = None,
    thorough: bool = True,
) -> Packs:
    """Packs of at most `capacity` tokens and `max_documents` documents, as few as best-fit-decreasing finds, or fewer.

    The result has at most as many packs as placing the documents one by one, longest first, each into the fullest pack
    that still has room. That is done only where filling in bulk fails: where it succeeds, no packing has fewer packs.
    Its work grows with the number of distinct lengths, not with the number of documents.

    thorough: where best-fit leaves more than NEAR above the lower bound, also try to fill packs exactly, which takes
    some ten times as long; not with `max_documents`.

    A seed draws which of several equally long documents goes where, and the order of the packs; how many packs there
    are does not depend on it. The same seed gives the same packs in every process.

    Raises ValueError for a length below 1 or above the capacity.
    """
    lengths_N = _checked(lengths, capacity=capacity, max_documents=max_documents)
    draw = None if seed is None else np.random.Generator(np.random.PCG64(seed))
    longest_first = _longest_first(lengths_N, draw)
    bound = max(lower_bound(lengths_N, capacity), -(-len(lengths_N) // (max_documents or capacity)))
    pack_N = None if max_documents else fill_in_bulk(lengths_N[longest_first], capacity, bound)
    if pack_N is None:
        pack_N = _expand(_fewest(lengths_N, capacity, bound, max_documents, thorough=thorough))
    if draw is not None:
        pack_N = draw.permutation(pack_N.max(initial=-1) + 1)[pack_N]
    return Packs(
        order=longest_first[stable_argsort(pack_N, below=len(lengths_N) + 1)],
        offsets=np.concatenate(([0], np.cumsum(np.bincount(pack_N)))),
        capacity=capacity,
        tokens=int(lengths_N.sum()),
        lower_bound=bound,
    )


def sum_bound(lengths_N: IntArray, capacity: int) -> int:
    """L1: all tokens, divided by the room of a pack, rounded up."""
    return -(-int(lengths_N.sum()) // capacity)


def martello_toth_bound(lengths_N: IntArray, capacity: int) -> int:
    """L2 of Martello and Toth, Knapsack Problems (1990), §8.3.2: never below L1 and sees documents over half a pack.

    For a threshold a ≤ capacity / 2: documents over `capacity - a` are alone among those of length ≥ a; those over
    half a pack are one a pack; of the rest of length ≥ a, only what exceeds the room beside the latter needs packs.
    """
    if not len(lengths_N):
        return 0
    return int(_threshold_bounds(lengths_N, capacity)[0].max())


def lower_bound(lengths_N: IntArray, capacity: int) -> int:
    """The larger of L2 and of L2's argument counted in documents instead of tokens.

    Beside a document over half a pack there are at most so many of length ≥ a as fit into less than half a pack; a
    pack without one holds at most capacity // a. That is tight where documents fit only in pairs.
    """
    if not len(lengths_N):
        return 0
    return int(np.maximum(*_threshold_bounds(lengths_N, capacity)).max())


def _threshold_bounds(lengths_N: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """The bound of each threshold, by tokens and by documents."""
    count = np.bincount(lengths_N)
    distinct = np.flatnonzero(count)
    number = np.concatenate(([0], np.cumsum(count[distinct])))
    tokens = np.concatenate(([0], np.cumsum(count[distinct] * distinct)))
    """Documents, and their tokens, among the first k distinct lengths."""
    half = int(np.searchsorted(distinct, capacity // 2, side="right"))
    # Between two lengths a larger threshold keeps the same documents and leaves more of them alone.
    thresholds = np.concatenate(([1], distinct[:half]))
    below = np.searchsorted(distinct, thresholds)
    above = np.searchsorted(distinct, capacity - thresholds, side="right")
    big = number[above] - number[half]
    over_half = number[-1] - number[half]
    small_tokens = tokens[half] - tokens[below]
    room_beside_big = big * capacity - (tokens[above] - tokens[half])
    small = number[half] - number[below]
    most_beside_big = big * ((capacity - capacity // 2 - 1) // thresholds)
    return (
        over_half + np.maximum(0, -((room_beside_big - small_tokens) // capacity)),
        over_half + np.maximum(0, -((most_beside_big - small) // (capacity // thresholds))),
    )


def _fewest(lengths_N: IntArray, capacity: int, bound: int, max_documents: int | None, *, thorough: bool) -> Placed:
    """The better of best-fit-decreasing and, where that leaves more than NEAR above the bound, of filling exactly."""
    counts = np.bincount(lengths_N, minlength=1)
    distinct = np.flatnonzero(counts)[::-1]
    at_most = max_documents or max(len(lengths_N), 1)
    placed = _best_fit(distinct.tolist(), counts[distinct].tolist(), capacity, at_most)
    for commonest in (False, True) if thorough and max_documents is None else ():
        if placed.total_packs > bound * (1 + NEAR) and (other := fill_exactly(counts, capacity, commonest=commonest)):
            placed = min(placed, other, key=lambda found: found.total_packs)
    return placed


BITS = 40
FIRST = (1 << BITS) - 1
"""A run of packs with the same room is one integer, (room << BITS) + its first pack: runs then sort by room, fast."""


def _best_fit(distinct: list[int], counts: list[int], capacity: int, max_documents: int) -> Placed:
    """Place `counts[j]` documents of `distinct[j]` tokens (descending).

    Packs with the same room are interchangeable, so they are kept as runs of consecutive numbers. A pack that took a
    document of length L is still the fullest with room for another as long as another fits, so it takes as many as
    fit, and all packs of a run do so at once. Lengths only fall: runs with room for the present one are a stack, the
    fullest on top; the others wait, the one with most room first. Written for speed: it is most of the packer's time.
    """
    first_pack, packs_of, each_of, total = _one_a_pack(distinct, counts, capacity)
    alone = len(first_pack)
    useful = distinct[-1] << BITS if distinct else 0
    limited = bool(distinct) and max_documents < capacity // distinct[-1]
    stack: list[int] = []
    waiting = [-((capacity - distinct[j] << BITS) + first_pack[j]) for j in reversed(range(alone))]
    waiting = [*waiting, 1] if max_documents > 1 else [1]
    """Runs as negative numbers, in order, and behind them one that none is above; those before `at` have left."""
    at = 0
    packs_in = {first: packs for first, packs in zip(first_pack, packs_of, strict=True) if packs > 1}
    """Of runs of several packs, by the first."""
    held = dict.fromkeys(first_pack, 1) if limited else {}
    """Documents in each pack of a run, by the first; kept only where `max_documents` can stop one."""

    def keep(run: int, packs: int, documents: int, token: int) -> None:
        if run < useful or documents == max_documents:
            return
        if packs > 1:
            packs_in[run & FIRST] = packs
        if limited:
            held[run & FIRST] = documents
        if run >= token:
            stack.append(run)
        else:
            insort(waiting, -run)

    for length, left in zip(distinct[alone:], counts[alone:], strict=True):
        token = length << BITS
        while waiting[at] <= -token:
            stack.append(-waiting[at])
            at += 1
        while left:
            if stack:
                run = stack.pop()
                first = run & FIRST
                packs = packs_in.pop(first, 1)
                if packs == 1 and not limited:  # most of them: what follows, written out for one
                    each = (run >> BITS) // length
                    if each > left:
                        each = left
                    left -= each
                    first_pack.append(first)
                    packs_of.append(1)
                    each_of.append(each)
                    run -= each * token
                    if run >= token:
                        stack.append(run)
                    elif run >= useful:
                        insort(waiting, -run, at)
                    continue
                documents = held[first] if limited else 0
            else:
                run, first, documents = (capacity << BITS) + total, total, 0
                packs = -(-left // min(capacity // length, max_documents))
                total += packs
            each = (run >> BITS) // length
            if limited:
                each = min(each, max_documents - documents)
            if packs == 1:
                each = min(each, left)
                full, rest = 1, 0
            else:
                full, rest = divmod(left, each)
                if full >= packs:
                    full, rest = packs, 0
            left -= full * each + rest
            if (used := full + (rest > 0)) < packs:
                keep(run + used, packs - used, documents, token)
            if rest:
                first_pack.append(first + full)
                packs_of.append(1)
                each_of.append(rest)
                keep(run + full - rest * token, 1, documents + rest, token)
            if full:
                first_pack.append(first)
                packs_of.append(full)
                each_of.append(each)
                keep(run - each * token, full, documents + each, token)
    return Placed(first_pack, packs_of, each_of, total)


def _one_a_pack(distinct: list[int], counts: list[int], capacity: int) -> tuple[list[int], list[int], list[int], int]:
    """First pack, packs and documents a pack of each length over half a pack, and the packs of all these together."""
    alone = bisect_right(distinct, -(capacity // 2) - 1, key=neg)
    ends = list(accumulate(counts[:alone]))
    return [0, *ends[:-1]] if ends else [], counts[:alone], [1] * alone, ends[-1] if ends else 0


def _expand(placed: Placed) -> IntArray:
    """[documents] pack of each document, in order of descending length."""
    first, packs, each = (np.array(column, np.int64) for column in (placed.first_pack, placed.packs, placed.each))
    ends = np.cumsum(packs)
    pack_of_entry = np.arange(packs.sum()) + np.repeat(first - (ends - packs), packs)
    return np.repeat(pack_of_entry, np.repeat(each, packs))


def _longest_first(lengths_N: IntArray, draw: np.random.Generator | None) -> IntArray:
    """Documents by descending length; ties drawn, or by index."""
    longest = int(lengths_N.max(initial=0))
    if draw is None:
        return stable_argsort(longest - lengths_N, below=longest + 1)
    shuffled = draw.permutation(len(lengths_N))
    return shuffled[stable_argsort(longest - lengths_N[shuffled], below=longest + 1)]


def _checked(lengths: npt.ArrayLike, *, capacity: int, max_documents: int | None) -> IntArray:
    if capacity < 1:
        raise ValueError(f"capacity is {capacity} tokens; a pack must hold at least 1")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents is {max_documents}; a pack must be allowed at least 1")
    array = np.asarray(lengths)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"lengths are {array.dtype}; they must be whole numbers of tokens")
    lengths_N = array.astype(np.int64).reshape(-1)
    if len(lengths_N) and (shortest := int(lengths_N.min())) < 1:
        raise ValueError(f"document {int(lengths_N.argmin())} has {shortest} tokens; every document needs at least 1")
    if len(lengths_N) and (longest := int(lengths_N.max())) > capacity:
        raise ValueError(
            f"document {int(lengths_N.argmax())} has {longest} tokens, more than a pack can hold ({capacity}): "
            "apply the over-long policy before packing"
        )
    return lengths_N
