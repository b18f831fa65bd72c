"""The share of assignments that a capacity drops, and the smallest factor that keeps it under a bound: exact, in numpy.

R pools, G groups that have a capacity each: experts, or expert-parallel ranks. A load is a share of the pool's
assignments times G, so that 1 is fair and a capacity factor bounds it.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]


def smallest_factor(loads_RG: Floats, *, drop: float, weights_R: Floats | None = None) -> float:
    """Smallest CF with mean over pools of Σ_g (load − CF)₊ / G ≤ drop; loads are shares times G (fair is 1).

    The drop is convex and piecewise linear in CF, the largest of the lines (S_i − i·CF) / (R·G) over the i largest
    loads with sum S_i; so CF is the largest of (S_i − drop·R·G) / i.
    """
    pools, groups = loads_RG.shape
    weights_R = np.full(pools, 1.0 / pools) if weights_R is None else weights_R
    # The mean load is 1, so no factor under this can do, and smaller loads never exceed the one that does.
    least = 1.0 - drop
    heavy = loads_RG > least
    loads = loads_RG[heavy]
    mass = np.broadcast_to(weights_R[:, None], loads_RG.shape)[heavy]
    order = np.argsort(-loads)
    sums, mass = np.cumsum((loads * mass)[order]), np.cumsum(mass[order])
    return max(least, float(((sums - drop * groups) / mass).max()))


def mean_drop(loads_RG: Floats, factor: float, *, weights_R: Floats | None = None) -> float:
    """Mean over pools of Σ_g (load − CF)₊ / G."""
    over_R = np.clip(loads_RG - factor, 0.0, None).mean(axis=1)
    return float(over_R.mean() if weights_R is None else (over_R * weights_R).sum())


def independent_factor(*, groups: int, assignments: int, drop: float) -> float:
    """The factor if all assignments were independent and every group as likely as another.

    Normal approximation, G s [φ(z) − z (1 − Φ(z))] ≤ drop with s² = (1 − 1/G) / (G·N) and z = (CF − 1) / (G·s).
    """
    spread = math.sqrt((1.0 - 1.0 / groups) / groups / assignments)

    def dropped(factor: float) -> float:
        z = (factor - 1.0) / groups / max(spread, 1e-12)
        density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return groups * spread * (density - z * 0.5 * math.erfc(z / math.sqrt(2.0)))

    low, high = 0.0, float(groups)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if dropped(middle) <= drop else (middle, high)
    return high


def drop_share(counts_RG: Ints, factor: float) -> Floats:
    """[R] share of each pool's assignments that exceed a capacity of ⌈factor × assignments / G⌉ a group."""
    assignments = counts_RG.sum(axis=1)
    room = np.ceil(factor * assignments / counts_RG.shape[1])
    over: Floats = np.clip(counts_RG - room[:, None], 0, None).sum(axis=1) / assignments
    return over
