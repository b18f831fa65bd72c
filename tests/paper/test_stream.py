"""The stream of packs: all documents once, room kept, a bounded wait, and nearly as full as packing all at once."""

import itertools

import numpy as np
import pytest

from gatewright.packing.pack import pack
from gatewright.packing.stream import pack_stream


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("buffer", [1, 7, 64, 1000])
def test_every_document_leaves_once_in_a_pack_that_holds_it(buffer, limit):
    lengths = np.random.default_rng(buffer).integers(1, 65, 500)
    packs = list(pack_stream(lengths.tolist(), 64, buffer=buffer, max_documents=limit))
    assert sorted(np.concatenate(packs).tolist()) == list(range(500))
    assert all(0 < lengths[held].sum() <= 64 for held in packs)
    assert limit is None or max(map(len, packs)) <= limit
    again = pack_stream(iter(lengths.tolist()), 64, buffer=buffer, max_documents=limit)
    assert [held.tolist() for held in again] == [held.tolist() for held in packs]


def test_no_more_documents_wait_than_the_buffer_holds():
    """Taken one by one, since packs must leave while the stream goes on without end."""
    read = 0

    def endless():
        nonlocal read
        for length in itertools.cycle([70, 11, 23, 64, 5, 98]):
            read += 1
            yield length

    left = 0
    for held in itertools.islice(pack_stream(endless(), 100, buffer=256), 2000):
        assert read - left <= 256
        left += len(held)


def test_documents_that_fit_with_nothing_do_not_wait_for_ever():
    """Sixty per cent of the room each, and a stream of small ones that fill packs completely without them."""
    lengths = [60] * 10 + [50, 50] * 5000
    packs = list(pack_stream(lengths, 100, buffer=64))
    last = max(k for k, held in enumerate(packs) if held.min() < 10)
    assert last < 500


def test_almost_as_full_as_all_at_once():
    rng = np.random.default_rng(3)
    for lengths in (rng.lognormal(5, 1.4, 60_000), rng.uniform(0.15 * 2048, 0.55 * 2048, 60_000)):
        lengths = np.clip(lengths, 1, 2048).astype(np.int64)
        streamed = sum(1 for _ in pack_stream(lengths.tolist(), 2048))
        assert streamed <= 1.001 * len(pack(lengths, 2048, thorough=False))


def test_edges():
    assert list(pack_stream([], 10)) == []
    assert [held.tolist() for held in pack_stream([10], 10)] == [[0]]
    with pytest.raises(ValueError, match="document 1 has 11 tokens"):
        list(pack_stream([3, 11], 10))
    with pytest.raises(ValueError, match="buffer is 0"):
        list(pack_stream([3], 10, buffer=0))
