"""The verdict on the router: which signs of illness two looks in a row show against step 0, in numbers.

Only signs that gave warning in measured collapses count (docs/router.md); MaxVio, drift and logsumexp² do not: the
first two raise false alarms, the third comes late or never.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gatewright.router.health import LEAST_EVIDENCE, LEAST_INFLATION, evidence
from gatewright.spec.event import RouterHealth
from gatewright.spec.run import Guard

Level = Literal["green", "yellow", "orange", "red"]
LOOKS = 2
"""Looks in a row that must agree."""
RANK: dict[Level, int] = {"green": 0, "yellow": 1, "orange": 2, "red": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How ill the router is at the newest look."""

    step: int
    level: Level
    """Worst level of a sign that both of the last two looks show; green while there are fewer."""
    reasons: tuple[str, ...]
    """One sentence for each such sign: what was measured, where, the limit, and the value at step 0."""
    severity: float
    """How far both looks are from step 0: the largest of the yellow signs over its limit."""
    clean: bool
    """Whether the newest look shows no sign at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    name: str
    level: Level
    excess: float
    """Distance from step 0 over the limit; above 1 the limit is broken."""
    shown: bool
    sentence: str


def judge(
    guard: Guard,
    first: RouterHealth,
    recent: Sequence[RouterHealth],
    *,
    top_k: int,
    experts: int,
    inflation: float | None = None,
    moe_layers: Sequence[int] | None = None,
) -> Verdict:
    """The verdict at the newest look, `recent[-1]`, against the look at step 0.

    inflation: variance inflation of the probe (health.variance_inflation); None takes the smallest that was measured.
    moe_layers: layer index of each row of the lists, for the sentences. Raises ValueError when there is no look.
    """
    if not recent:
        raise ValueError("no look to judge")
    rows = moe_layers if moe_layers is not None else range(len(first.kl))
    factor = LEAST_INFLATION if inflation is None else inflation
    looks = []
    for look in recent[-LOOKS:]:
        signs = [*_moved(guard, first, look, rows), *_uneven(guard, first, look, rows, experts)]
        if evidence(look.tokens, top_k=top_k, experts=experts, inflation=factor) >= LEAST_EVIDENCE:
            signs.append(_died(guard, first, look, rows))
        looks.append(signs)
    newest, before = looks[-1], {sign.name: sign for sign in looks[0]} if len(looks) == LOOKS else {}
    both = [(sign, before[sign.name]) for sign in newest if sign.name in before]
    lasting = sorted((now for now, then in both if now.shown and then.shown), key=lambda sign: -RANK[sign.level])
    return Verdict(
        step=recent[-1].step,
        level=lasting[0].level if lasting else "green",
        reasons=tuple(sign.sentence for sign in lasting),
        severity=max((min(now.excess, then.excess) for now, then in both if now.level == "yellow"), default=0.0),
        clean=not any(sign.shown for sign in newest),
    )


def _moved(guard: Guard, first: RouterHealth, look: RouterHealth, rows: Sequence[int]) -> list[_Sign]:
    """Yellow: the router chooses otherwise than at step 0, or more sharply. Means over layers."""
    kl, overlap = _mean(look.kl), _mean(look.overlap)
    entropy, entropy_0 = _mean(look.token_entropy), _mean(first.token_entropy)
    row = max(range(len(look.kl)), key=look.kl.__getitem__)
    least = min(range(len(look.overlap)), key=look.overlap.__getitem__)
    return [
        _sign(
            "kl", "yellow", kl / guard.yellow_kl,
            f"KL of the routing from step 0 is {kl:.3g} nats (limit {guard.yellow_kl:g}); largest in layer "
            f"{rows[row]}, {look.kl[row]:.3g}",
        ),
        _sign(
            "overlap", "yellow", _over(guard.yellow_overlap, overlap),
            f"{overlap:.1%} of the top-k choices are still those of step 0 (limit {guard.yellow_overlap:.0%}); fewest "
            f"in layer {rows[least]}, {look.overlap[least]:.1%}",
        ),
        _sign(
            "entropy", "yellow", _over(guard.yellow_entropy * entropy_0, entropy),
            f"token entropy is {entropy:.3g}, at step 0 {entropy_0:.3g} (limit {guard.yellow_entropy:g} of that)",
        ),
    ]  # fmt: skip


def _uneven(guard: Guard, first: RouterHealth, look: RouterHealth, rows: Sequence[int], experts: int) -> list[_Sign]:
    """Orange: the load has become uneven. Experts over all layers; CV of the worst layer, then and now."""
    everyone = experts * len(look.starved)
    starved, starved_0 = sum(look.starved), sum(first.starved)
    # Rounded, so that 5 % of 64 experts is 3 of them: the rule that was measured.
    allowed = max(1, round(guard.orange_starved * everyone))
    row = max(range(len(look.load_cv)), key=look.load_cv.__getitem__)
    cv, cv_0 = look.load_cv[row], max(first.load_cv)
    return [
        _count_sign(
            "starved", "orange", starved - starved_0 >= allowed,
            f"{starved} of {everyone} experts starve, at step 0 {starved_0} (limit {allowed} more)",
        ),
        _sign(
            "cv", "orange", _over(cv, guard.orange_cv * cv_0),
            f"largest load CV is {cv:.3g}, in layer {rows[row]}, at step 0 {cv_0:.3g} (limit {guard.orange_cv:g} times "
            "that)",
        ),
    ]  # fmt: skip


def _died(guard: Guard, first: RouterHealth, look: RouterHealth, rows: Sequence[int]) -> _Sign:
    """Red: experts that had tokens at step 0 have none. Layer by layer: none that came back hides one that died."""
    died = [max(0, now - then) for now, then in zip(look.dead, first.dead, strict=True)]
    where = ", ".join(f"{count} in layer {row}" for row, count in zip(rows, died, strict=True) if count)
    return _count_sign(
        "dead", "red", sum(died) >= guard.red_dead,
        f"{sum(died)} experts that had tokens at step 0 have none (limit {guard.red_dead}): {where}",
    )  # fmt: skip


def _sign(name: str, level: Level, excess: float, sentence: str) -> _Sign:
    # A router whose numbers are none is not healthy.
    excess = math.inf if math.isnan(excess) else excess
    return _Sign(name=name, level=level, excess=excess, shown=excess > 1.0, sentence=sentence)


def _count_sign(name: str, level: Level, shown: bool, sentence: str) -> _Sign:
    return _Sign(name=name, level=level, excess=float(shown), shown=shown, sentence=sentence)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _over(value: float, limit: float) -> float:
    """value / limit; infinite where the limit is 0 and the value is not."""
    if limit == 0:
        return math.inf if value > 0 else 0.0
    return value / limit
