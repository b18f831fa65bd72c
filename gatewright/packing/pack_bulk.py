"""All documents into a given number of packs by steps over whole arrays, which is faster than placing one by one.

The packs together have little more room than the documents need, so nearly every pack must become full to the last
token. While packs have room for many documents each, these are dealt in runs. Then every pack takes one document a
step, the longest that fits and no fuller pack wants. The last few are placed one by one. Documents may be left over
where best-fit would have placed them all, so a failure proves nothing.
"""

from bisect import bisect_left, insort

import numpy as np

from gatewright.packing.arrays import IntArray

Chosen = tuple[IntArray, IntArray]
"""Documents, and the room that each goes into: places in the arrays that they were chosen from."""
STEPS = 30
"""After so many, all that is left is placed one by one."""
FEW = 250
"""Documents that are placed one by one as fast as by further steps."""
MANY = 50_000
"""Documents from which on it is not tried: there many are equally long, and best-fit places those together."""
SPARE = 0.5
"""Tokens of room a pack, beyond those of its documents, below which it is not tried: it would rarely succeed."""
LOOSE = 1.5
"""Longest documents that a pack has room for, on average, from which on documents are dealt in runs."""
BITS = 32


def fill_in_bulk(length_N: IntArray, capacity: int, packs: int) -> IntArray | None:
    """[documents] pack of each, the documents being given by descending length; None where they do not all fit.

    packs: at least as many as there are documents over half the capacity; none of them stays empty if it is a lower
    bound.
    """
    if len(length_N) >= MANY or packs * capacity - int(length_N.sum()) < SPARE * packs:
        return None
    alone = len(length_N) - int(np.searchsorted(length_N[::-1], capacity // 2, side="right"))
    pack_N = np.arange(len(length_N))
    left, length = pack_N[alone:], length_N[alone:]
    room = np.full(packs, capacity)
    room[:alone] -= length_N[:alone]
    pack = np.arange(packs)
    """`room` and `pack` are of packs that may take one more document, `left` and `length` of documents to place."""
    for _ in range(STEPS):
        if len(left) <= FEW:
            break
        useful = (room >= length[-1]).nonzero()[0]
        room, pack = room[useful], pack[useful]
        tokens = int(length.sum())
        if (spare := int(room.sum()) - tokens) < 0:
            return None
        if tokens >= LOOSE * len(room) * int(length[0]):
            documents, rooms = _deal(length, room, capacity)
        else:
            documents, rooms = _one_each(length, room, capacity, spare)
        if not len(documents):
            return None
        pack_N[left[documents]] = pack[rooms]
        room -= np.bincount(rooms, length[documents], minlength=len(room)).astype(np.int64)
        stays = np.ones(len(left), bool)
        stays[documents] = False
        left, length = left[stays], length[stays]
    one_by_one = _one_by_one(length, room, pack)
    if len(one_by_one) < len(left):
        return None
    pack_N[left] = one_by_one
    return pack_N


def _deal(length: IntArray, room: IntArray, capacity: int) -> Chosen:
    """Consecutive documents into each room, until less of it is left than the first of them takes.

    The largest room begins with the longest document. Where each room begins is guessed as if all kept the longest
    document's room free; where that guess makes a room's documents too many, they stay.
    """
    longest = length[0]
    largest_first = stable_argsort(capacity - room, below=capacity + 1)
    room = room[largest_first]
    begins = np.cumsum(length) - length
    share = np.maximum(room - longest, 0)
    first = np.searchsorted(begins, np.cumsum(share) - share).clip(max=len(length) - 1)
    share = np.maximum(room - length[first], 0)
    ends = np.searchsorted(begins, np.cumsum(share))
    taker = np.repeat(np.arange(len(room)), np.diff(ends, prepend=0))
    fits = np.bincount(taker, length[: len(taker)], minlength=len(room)) <= room
    documents = np.flatnonzero(fits[taker])
    return documents, largest_first[taker[documents]]


def _one_each(length: IntArray, room: IntArray, capacity: int, spare: int) -> Chosen:
    """One document at most into each room: the longest that fits and that no smaller room takes.

    By ascending size, documents open and rooms close as brackets do: a pair lies next to each other among those of
    one depth. A pair that would leave a gap which no document fills stays, unless gaps like it can be afforded.
    """
    candidates = length[: len(room)]
    ascending = stable_argsort(np.concatenate((candidates, room)), below=capacity + 1)
    is_room = ascending >= len(candidates)
    depth = (1 - 2 * is_room).cumsum() + is_room
    depth -= depth.min()
    by_depth = stable_argsort(depth, below=len(depth) + 1)
    item, depth, is_room = ascending[by_depth], depth[by_depth], is_room[by_depth]
    at = ((is_room[1:] > is_room[:-1]) & (depth[1:] == depth[:-1])).nonzero()[0]
    documents, rooms = item[at], item[at + 1] - len(candidates)
    gap = room[rooms] - length[documents]
    good = ((gap <= spare / len(room)) | (gap >= length[-1])).nonzero()[0]
    return (documents[good], rooms[good]) if len(good) else (documents, rooms)


def _one_by_one(length: IntArray, room: IntArray, pack: IntArray) -> list[int]:
    """Pack of each document, longest first, each into the smallest room that it fits into; ends where none is left."""
    rooms = np.sort((room << BITS) + pack).tolist()
    packs = []
    for needed in (length << BITS).tolist():
        at = bisect_left(rooms, needed)
        if at == len(rooms):
            break
        chosen = rooms.pop(at)
        packs.append(chosen & ((1 << BITS) - 1))
        insort(rooms, chosen - needed)
    return packs


def stable_argsort(keys_N: IntArray, *, below: int) -> IntArray:
    """Indices that sort keys in [0, below); numpy sorts 16-bit integers by radix, far faster than 64-bit ones."""
    return np.argsort(keys_N.astype(np.uint16) if below <= 1 << 16 else keys_N, kind="stable")
