"""Deals documents to bins, such as ranks of a micro-batch: many at a time, and as one after another would.

Documents come longest first, which is also by descending work.
"""

import numpy as np

from gatewright.packing.arrays import FloatArray, IntArray


def deal(works_D: FloatArray, tokens_D: IntArray, load_B: FloatArray, room_B: IntArray, limit_s: float) -> IntArray:
    """The bin of each document, or -1: where least is to do among bins with room, if that keeps within the limit.

    `load_B` and `room_B` are brought up to date. A round deals documents to bins by ascending load, as long as the
    next bin has less to do than any that has just got a document: as long as longest-first would go there too. From
    the first document on that would be late, shorter ones fill gaps.
    """
    bins_D = np.full(len(works_D), -1)
    at = 0
    while at < len(works_D):
        open_B = np.flatnonzero(room_B >= tokens_D[at])
        order_B = open_B[np.argsort(load_B[open_B], kind="stable")][: len(works_D) - at]
        ends_B = load_B[order_B] + works_D[at : at + len(order_B)]
        if not len(order_B) or ends_B[0] > limit_s:
            bins_D[at:] = fill_up(works_D[at:], tokens_D[at:], load_B, room_B, limit_s)
            break
        in_turn_B = (load_B[order_B[1:]] <= np.minimum.accumulate(ends_B)[:-1]) & (ends_B[1:] <= limit_s)
        count = len(order_B) if in_turn_B.all() else int(in_turn_B.argmin()) + 1
        chosen_B = order_B[:count]
        bins_D[at : at + count] = chosen_B
        load_B[chosen_B] = ends_B[:count]
        room_B[chosen_B] -= tokens_D[at : at + count]
        at += count
    return bins_D


def fill_up(works_D: FloatArray, tokens_D: IntArray, load_B: FloatArray, room_B: IntArray, limit_s: float) -> IntArray:
    """The bin of each document, or -1: the longest that fit into what is left of each bin within the limit.

    `load_B` and `room_B` are brought up to date. In a round each bin gets the longest document that fits, or where
    several want the same, the next one, which is no longer.
    """
    bins_D = np.full(len(works_D), -1)
    left_D = np.arange(len(works_D))
    while len(left_D):
        longest_B = np.maximum(
            np.searchsorted(-works_D[left_D], load_B - limit_s), np.searchsorted(-tokens_D[left_D], -room_B)
        )
        order_B = np.argsort(longest_B, kind="stable")
        places_B = np.arange(len(order_B))
        taken_B = np.maximum.accumulate(longest_B[order_B] - places_B) + places_B
        count = int(np.searchsorted(taken_B, len(left_D)))
        if not count:
            break
        documents, chosen_B = left_D[taken_B[:count]], order_B[:count]
        bins_D[documents] = chosen_B
        load_B[chosen_B] += works_D[documents]
        room_B[chosen_B] -= tokens_D[documents]
        left_D = np.delete(left_D, taken_B[:count])
    return bins_D
