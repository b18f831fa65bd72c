"""Percentiles, the histogram, and the share of padding."""

import numpy as np
import pytest

from gatewright.packing.lengths import histogram, padded_fill, percentile


def test_percentiles_are_lengths_that_occur():
    lengths = np.arange(1, 1001)[::-1]
    assert [percentile(lengths, p) for p in (0, 50, 99, 99.9, 100)] == [1, 500, 990, 999, 1000]
    assert percentile(np.array([7]), 50) == 7
    with pytest.raises(ValueError, match="no documents"):
        percentile(np.array([], int), 50)


def test_padding_to_the_longest_of_a_batch():
    assert padded_fill(np.full(10, 5), batch_size=4) == 1.0
    assert padded_fill(np.array([1, 9]), batch_size=1) == 1.0
    assert padded_fill(np.array([1, 9]), batch_size=2) == 10 / 18
    # The last, smaller batch is padded to its own longest only.
    lengths = np.array([3, 5, 9])
    order = np.random.Generator(np.random.PCG64(0)).permutation(3)
    slots = 2 * lengths[order[:2]].max() + lengths[order[2]]
    assert padded_fill(lengths, batch_size=2, seed=0) == 17 / slots


def test_histogram_counts_every_document_once():
    lengths = np.concatenate([np.full(40, 3), np.full(10, 100), [129]])
    lines = histogram(lengths, width=20)
    assert [line.split()[0] for line in lines] == ["2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255"]
    assert lines[0].split()[1] == "█" * 20
    assert "40" in lines[0] and "10.0%" not in lines[0]
    assert lines[-1].rstrip().endswith(f"1  {129 / lengths.sum():>6.1%} of tokens")
    assert len({len(line) for line in lines}) == 1
    assert histogram(np.array([], int)) == ["no documents"]
