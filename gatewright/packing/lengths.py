"""What a set of document lengths looks like: percentiles, a histogram in text, and what padding would waste on it."""

import numpy as np

from gatewright.packing.arrays import IntArray

BARS = " ▏▎▍▌▋▊▉█"


def percentile(lengths_N: IntArray, percent: float) -> int:
    """The smallest of the lengths that at least `percent` % of the documents do not exceed; 100 gives the longest.

    Nearest rank, so the result is a length that occurs. Raises ValueError when there are no documents.
    """
    if not len(lengths_N):
        raise ValueError("no documents, so no percentile")
    # 99.9 / 100 × 1000 is 999.0000000000001: rounding off the noise keeps the rank at 999.
    rank = max(1, int(np.ceil(round(percent / 100 * len(lengths_N), 6))))
    return int(np.partition(lengths_N, rank - 1)[rank - 1])


def padded_fill(lengths_N: IntArray, *, batch_size: int, seed: int = 0) -> float:
    """Share of tokens in batches of `batch_size` documents in random order, each padded to its longest: 0 to 1."""
    slots = int(padded_lengths(lengths_N, batch_size=batch_size, seed=seed).sum())
    return int(lengths_N.sum()) / slots if slots else 1.0


def padded_lengths(lengths_N: IntArray, *, batch_size: int, seed: int = 0) -> IntArray:
    """[documents] slots that each takes in batches of `batch_size` in random order, padded to their longest."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths_N))
    starts = np.arange(0, len(lengths_N), batch_size)
    sizes = np.diff(np.append(starts, len(lengths_N)))
    longest = np.maximum.reduceat(lengths_N[order], starts) if len(starts) else starts
    return np.repeat(longest, sizes)


def histogram(lengths_N: IntArray, *, width: int = 60) -> list[str]:
    """One line a bin: its range of lengths, a bar, documents, and the share of all tokens that lies in it.

    Bins double in size (1, 2-3, 4-7, ...) from the one of the shortest document to that of the longest.
    """
    if not len(lengths_N):
        return ["no documents"]
    edges = 2 ** np.arange(int(lengths_N.min()).bit_length() - 1, int(lengths_N.max()).bit_length() + 1)
    bin_N = np.searchsorted(edges, lengths_N, side="right") - 1
    documents = np.bincount(bin_N)
    token_share = np.bincount(bin_N, weights=lengths_N) / lengths_N.sum()
    labels = [f"{begin:,}-{2 * begin - 1:,}" if begin > 1 else "1" for begin in edges[:-1].tolist()]
    label_width, count_width = max(map(len, labels)), len(f"{documents.max():,}")
    return [
        f"{label:>{label_width}}  {_bar(count / documents.max(), width):<{width}}  "
        f"{count:>{count_width},}  {share:>6.1%} of tokens"
        for label, count, share in zip(labels, documents, token_share, strict=True)
    ]


def _bar(share: float, width: int) -> str:
    """A bar of `share` × `width` characters, to an eighth of one; something is shown for every share above 0."""
    eighths = max(round(share * width * 8), 1 if share else 0)
    return (BARS[8] * (eighths // 8) + BARS[eighths % 8]).rstrip()
