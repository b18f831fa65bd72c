"""Expert loads: how far each expert's share of the routed tokens is from the fair one, over the run and in time."""

import math
from dataclasses import dataclass
from operator import add

STARVED = 0.1
"""An expert with less than this part of the fair share learns next to nothing."""
WINDOWS = 128
"""Windows of time kept at most; two neighbours become one when there would be more."""

Counts = list[list[int]]
"""[MoE layer][expert] tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """Loads of one MoE layer. A load is a share of the layer's tokens × experts: 1 is the fair share."""

    layer: int
    tokens: tuple[int, ...]
    """Per expert, over the run."""
    load: tuple[float, ...]
    first: tuple[float, ...]
    """Loads in the first tenth of the run; empty if the run is too short for tenths."""
    last: tuple[float, ...]
    """Loads in the last tenth."""

    @property
    def max_load(self) -> float:
        return max(self.load)

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation / mean of the loads."""
        mean = math.fsum(self.load) / len(self.load)
        if mean == 0:
            return 0.0
        return math.sqrt(math.fsum((load - mean) ** 2 for load in self.load) / len(self.load)) / mean

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that got no token at all."""
        return tuple(expert for expert, tokens in enumerate(self.tokens) if tokens == 0)

    @property
    def starved(self) -> tuple[int, ...]:
        """Experts under 10 % of the fair share that got some token."""
        return tuple(expert for expert, load in enumerate(self.load) if 0 < load < STARVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Routing of a whole run."""

    layers: tuple[LayerLoad, ...]
    tenth_steps: int
    """Steps in the first and in the last tenth; 0 if the run is too short for tenths."""
    window_steps: tuple[int, ...]
    """Last step of each window of `worst_over_time`."""
    worst_over_time: tuple[tuple[float, ...], ...]
    """[window][expert] loads of the worst layer."""

    @property
    def worst(self) -> LayerLoad:
        """Layer whose busiest expert is furthest above the fair share."""
        return max(self.layers, key=lambda layer: layer.max_load)


class LoadsInTime:
    """Sums counts [MoE layer][expert] into windows of equally many steps; memory does not grow with the run."""

    def __init__(self) -> None:
        self.steps_per_window = 1
        self._windows: list[Counts] = []
        self._ends: list[int] = []
        self._in_last_window = 0

    def fits(self, counts: Counts) -> bool:
        """Whether the counts have the shape of those before."""
        if not self._windows:
            return bool(counts) and all(counts)
        return [len(row) for row in counts] == [len(row) for row in self._windows[0]]

    def add(self, step: int, counts: Counts) -> None:
        """Counts one step; `counts` must fit."""
        if self._windows and self._in_last_window < self.steps_per_window:
            self._windows[-1] = _sum(self._windows[-1], counts)
            self._ends[-1] = step
            self._in_last_window += 1
            return
        if len(self._windows) == WINDOWS:
            pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
            self._windows = [_sum(left, right) for left, right in pairs]
            self._ends = self._ends[1::2]
            self.steps_per_window *= 2
        self._windows.append(counts)
        self._ends.append(step)
        self._in_last_window = 1

    def finish(self, moe_layers: list[int]) -> Loads | None:
        """The loads of what was counted, None if nothing was; `moe_layers` names the rows."""
        if not self._windows:
            return None
        total = _total(self._windows)
        names = moe_layers if len(moe_layers) == len(total) else list(range(len(total)))
        tenth = len(self._windows) // 10 if len(self._windows) >= 20 else 0
        first = _total(self._windows[:tenth]) if tenth else [[] for _ in total]
        last = _total(self._windows[-tenth:]) if tenth else [[] for _ in total]
        layers = tuple(
            LayerLoad(layer=name, tokens=tuple(all_), load=_loads(all_), first=_loads(begin), last=_loads(end))
            for name, all_, begin, end in zip(names, total, first, last, strict=True)
        )
        worst = max(range(len(layers)), key=lambda row: layers[row].max_load)
        return Loads(
            layers=layers,
            tenth_steps=tenth * self.steps_per_window,
            window_steps=tuple(self._ends),
            worst_over_time=tuple(_loads(window[worst]) for window in self._windows),
        )


def busiest(counts: Counts) -> float:
    """Largest load of any expert in any layer, NaN without counts: the factor by which the slowest expert lags."""
    return max((max(row) * len(row) / sum(row) for row in counts if any(row)), default=math.nan)


def _sum(left: Counts, right: Counts) -> Counts:
    return [list(map(add, a, b)) for a, b in zip(left, right, strict=True)]


def _total(windows: list[Counts]) -> Counts:
    total = windows[0]
    for window in windows[1:]:
        total = _sum(total, window)
    return total


def _loads(tokens: list[int]) -> tuple[float, ...]:
    total = sum(tokens)
    return tuple(count * len(tokens) / total if total else 0.0 for count in tokens)
