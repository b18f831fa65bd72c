"""Long runs made short: a quantity over the steps in buckets that keep their extremes."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

POINTS = 600
"""Buckets a series is reduced to: about one a pixel of the page's charts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity over the steps. A bucket without a finite value has NaN in mean, low and high."""

    steps: tuple[int, ...]
    """Last step of each bucket."""
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    steps_per_bucket: int
    """1: every step is shown."""
    not_finite: tuple[int, ...]
    """Steps whose value was NaN or infinite, the first 1,000 of them."""

    @property
    def finite(self) -> list[float]:
        """Every finite extreme, for the range of an axis."""
        return [value for value in (*self.low, *self.high) if math.isfinite(value)]


def reduce(steps: Sequence[int], values: Sequence[float], *, points: int = POINTS) -> Series:
    """The values in at most `points` buckets of equally many steps, with mean, lowest and highest of each."""
    width = max(1, -(-len(steps) // points))
    mean, low, high = array("d"), array("d"), array("d")
    for begin in range(0, len(steps), width):
        bucket = [value for value in values[begin : begin + width] if math.isfinite(value)]
        mean.append(math.fsum(bucket) / len(bucket) if bucket else math.nan)
        low.append(min(bucket, default=math.nan))
        high.append(max(bucket, default=math.nan))
    broken = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    return Series(
        steps=tuple(steps[min(begin + width, len(steps)) - 1] for begin in range(0, len(steps), width)),
        mean=tuple(mean),
        low=tuple(low),
        high=tuple(high),
        steps_per_bucket=width,
        not_finite=tuple(broken[:1000]),
    )


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """At each place the mean of the finite values at most window / 2 places away; NaN where the value is not finite."""
    half = window // 2
    means = []
    for place, value in enumerate(values):
        near = [other for other in values[max(0, place - half) : place + half + 1] if math.isfinite(other)]
        means.append(math.fsum(near) / len(near) if math.isfinite(value) else math.nan)
    return means


def median(values: Sequence[float]) -> float:
    """Median of the finite values; NaN when there is none."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return math.nan
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
