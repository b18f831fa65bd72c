"""All documents into a given number of packs by steps over whole arrays: many times faster than one by one.

The packs have room for little more than the documents, so nearly every pack must become full to the last token. While
packs have room for many documents each, these are dealt in runs; later each pack takes one document a step, the
longest that fits, as best-fit would; the last few documents are placed one by one. It may fail where best-fit does
not: then nothing is known.
"""

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Chosen = tuple[IntArray, IntArray]
"""Documents, and the room that each goes into: places in the arrays that they were chosen from."""
FEW = 300
"""Documents from which on one by one is as fast."""
DEALT = 2
"""Documents a pack that a deal must place, or one by one a pack is better: it leaves rooms that documents fit into."""
SPARE = 0.5
"""Tokens of room a pack beyond those of the documents, below which it is not tried, as it would rarely go."""
BITS = 32


def fill_in_bulk(length_N: IntArray, capacity: int, packs: int) -> IntArray | None:
    """[documents] pack of each document, given by descending length; None where some found no room."""
    alone = len(length_N) - int(np.searchsorted(length_N[::-1], capacity // 2, side="right"))
    tokens = int(length_N.sum())
    if packs * capacity - tokens < SPARE * packs:
        return None
    pack_N = np.arange(len(length_N))
    left, length = pack_N[alone:], length_N[alone:]
    room = np.full(packs, capacity)
    room[:alone] -= length_N[:alone]
    pack = np.arange(packs)
    """Of every pack that can take one more document; `left` and `length` of every document that is not placed."""
    while len(left) > FEW:
        useful = (room >= length[-1]).nonzero()[0]
        room, pack = room[useful], pack[useful]
        tokens = int(length.sum())
        if (spare := int(room.sum()) - tokens) < 0:
            return None
        loose = len(length) >= DEALT * len(room) and tokens >= DEALT * len(room) * int(length[0])
        documents, rooms = (loose and _deal(length, room, capacity)) or _one_each(length, room, capacity, spare)
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


def _deal(length: IntArray, room: IntArray, capacity: int) -> Chosen | None:
    """Consecutive documents to each room, until less is left of it than the first of them takes; None if too few go.

    Lengths descend. The largest room begins with the longest document; where a room's documents would not fit after
    all, they stay.
    """
    longest = length[0]
    largest_first = stable_argsort(capacity - room, below=capacity + 1)
    room = room[largest_first]
    begins = np.cumsum(length) - length
    share = np.maximum(room - longest, 0)
    first = np.searchsorted(begins, np.cumsum(share) - share).clip(max=len(length) - 1)
    share = np.maximum(room - length[first], 0)
    ends = np.searchsorted(begins, np.cumsum(share))
    if ends[-1] < DEALT * len(room):
        return None
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
    """Indices that sort keys of 0 to `below`; numpy sorts 16-bit integers by radix, far faster than 64-bit ones."""
    return np.argsort(keys_N.astype(np.uint16) if below <= 1 << 16 else keys_N, kind="stable")
