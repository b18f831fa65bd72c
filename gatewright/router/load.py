"""Expert load from routing counts: how far the busiest expert of each layer is above its fair share."""

from collections.abc import Sequence


def load_ratios(counts: Sequence[int]) -> list[float]:
    """Each expert's assignments over the fair share (all assignments / experts); 1 everywhere is perfect balance."""
    total = sum(counts)
    return [count * len(counts) / total if total else 0.0 for count in counts]


def worst_load(counts_by_layer: Sequence[Sequence[int]]) -> tuple[float, int]:
    """(largest load ratio of any expert in any layer, row of that layer); (0.0, 0) where nothing was routed."""
    peaks = [max(load_ratios(counts), default=0.0) for counts in counts_by_layer]
    if not peaks:
        return 0.0, 0
    row = max(range(len(peaks)), key=peaks.__getitem__)
    return peaks[row], row
