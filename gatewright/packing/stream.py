"""Packs for a stream of documents whose end is not in sight: a bounded buffer, packed whole again and again.

documents ─→ buffer ─→ best-fit-decreasing ─→ full packs leave, documents of the others stay
                                              and some of the others must leave, however full they are
"""

from collections.abc import Iterable, Iterator

import numpy as np

from gatewright.packing.arrays import IntArray
from gatewright.packing.pack import pack

FULL = 0.9995
"""Share of the capacity from which on a pack leaves at once."""
FORCED = 4
"""At least one pack in so many leaves in every round, so that a document is packed only a few times."""
PATIENCE = 8
"""Rounds after which a document leaves with whatever pack it is in."""


def pack_stream(
    lengths: Iterable[int], capacity: int, *, buffer: int = 8192, max_documents: int | None = None
) -> Iterator[IntArray]:
    """Packs of documents (numbers counted in the order of arrival) of at most `capacity` tokens, as they fill up.

    At most `buffer` documents wait at a time. The order of arrival decides everything, so every process gets the same
    packs; the effort for a document does not grow with the stream. What waits at the end is packed and leaves.

    Raises ValueError for a length below 1 or above the capacity, when it arrives.
    """
    if buffer < 1:
        raise ValueError(f"buffer is {buffer} documents; wanted at least 1")
    waiting = Waiting(capacity, max_documents)
    arrived: list[int] = []
    for document, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"document {document} has {length} tokens; wanted 1 to {capacity}")
        arrived.append(length)
        if len(waiting) + len(arrived) == buffer:
            waiting.receive(arrived)
            arrived = []
            yield from waiting.release(everything=False)
    waiting.receive(arrived)
    yield from waiting.release(everything=True)


class Waiting:
    """Documents that have arrived and not left."""

    def __init__(self, capacity: int, max_documents: int | None) -> None:
        self.capacity = capacity
        self.max_documents = max_documents
        self.arrivals = 0
        self.number_N = np.zeros(0, np.int64)
        self.tokens_N = np.zeros(0, np.int64)
        self.rounds_N = np.zeros(0, np.int64)
        """How often each has been packed and stayed."""

    def __len__(self) -> int:
        return len(self.number_N)

    def receive(self, tokens: list[int]) -> None:
        numbers = np.arange(self.arrivals, self.arrivals + len(tokens))
        self.arrivals += len(tokens)
        self.number_N = np.concatenate((self.number_N, numbers))
        self.tokens_N = np.concatenate((self.tokens_N, np.array(tokens, np.int64)))
        self.rounds_N = np.concatenate((self.rounds_N, np.zeros(len(tokens), np.int64)))

    def release(self, *, everything: bool) -> Iterator[IntArray]:
        """Packs that leave: full ones, those of impatient documents, the fullest of the others; or all."""
        if not len(self):
            return
        packs = pack(self.tokens_N, self.capacity, max_documents=self.max_documents, thorough=False)
        leaves_P = np.ones(len(packs), bool)
        if not everything:
            filled_P = np.add.reduceat(self.tokens_N[packs.order], packs.offsets[:-1])
            oldest_P = np.maximum.reduceat(self.rounds_N[packs.order], packs.offsets[:-1])
            leaves_P = (filled_P >= FULL * self.capacity) | (oldest_P >= PATIENCE)
            leaves_P[np.argsort(-filled_P, kind="stable")[: -(-len(packs) // FORCED)]] = True
        yield from (self.number_N[packs[k]] for k in np.flatnonzero(leaves_P).tolist())
        stays = packs.order[~np.repeat(leaves_P, np.diff(packs.offsets))]
        self.number_N, self.tokens_N = self.number_N[stays], self.tokens_N[stays]
        self.rounds_N = self.rounds_N[stays] + 1
