"""The guard: looks at the router against step 0, says how ill it is, and which action of the run file is next.

    look ──judge──▶ verdict ──decide──▶ action, new state

Nothing here touches a model. The trainer looks, acts, and saves the state with its checkpoints; on several ranks each
comes to the same decision, since the looks are the same.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gatewright.router.verdict import LOOKS, RANK, Level, Verdict
from gatewright.spec.event import GuardActed, RouterHealth
from gatewright.spec.run import Guard, Router

Action = Literal["lower_lr", "freeze", "balance", "bias", "rollback", "reset", "stop"]

ANSWERS: dict[Action, Level] = {
    "lower_lr": "yellow",
    "balance": "yellow",
    "freeze": "orange",
    "bias": "orange",
    "rollback": "red",
    "reset": "red",
    "stop": "red",
}
"""Mildest level that each action answers."""
WORSE = 1.1
"""No action takes back that a yellow router has moved away from step 0; it is acted on again when this much farther."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """All the guard remembers. It survives a rollback: the weights go back, the actions stay done."""

    trains: bool
    """Whether the run file lets the router train."""
    first: RouterHealth | None = None
    """The look at step 0."""
    recent: tuple[RouterHealth, ...] = ()
    """The last looks since step 0 or since the last action, the newest at the end. An action forgets them, and so has
    two looks of time to work before the next."""
    done: tuple[Action, ...] = ()
    healthy_step: int = 0
    """Step of the last look that showed nothing at all. A rollback goes to the newest checkpoint up to it."""
    told: Level = "green"
    """Worst level that an event `none` told of since the router was last healthy, or since the last action."""
    acted_at: float = 0.0
    """Severity at the last action; 0 since the router was last healthy."""

    @property
    def frozen(self) -> bool:
        """Whether the router stands still now."""
        return not self.trains or _guard_froze(self.done)


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The router's settings after the actions so far: what the trainer applies, after each action and on resume."""

    trains: bool
    lr_scale: float
    """Learning rate of the router over train.lr."""
    balance: float
    """Weight of the balance loss."""
    bias_rate: float


def due(guard: Guard, *, step: int) -> bool:
    """Whether the router is looked at after this step: closer together in the beginning, where a hot run collapses."""
    early = step <= 2 * guard.every_steps
    return step % (max(1, guard.every_steps * 2 // 5) if early else guard.every_steps) == 0


def remember(state: GuardState, look: RouterHealth) -> GuardState:
    """The state with one more look. The first one, at step 0, is what the others are held against."""
    if state.first is None:
        return replace(state, first=look)
    return replace(state, recent=(*state.recent, look)[-LOOKS:])


def decide(router: Router, state: GuardState, verdict: Verdict) -> tuple[GuardActed | None, GuardState]:
    """The event of what is to be done now, None for nothing, and the state after it.

    The next action is the first in router.guard.action that was not done, answers the level and can change something;
    each entry is used once, so an action that may be repeated is listed as often. `none` is told once a level. The
    trainer carries the action out; `rollback` goes to the newest checkpoint up to the state's healthy_step.
    """
    if verdict.clean:
        return None, replace(state, healthy_step=verdict.step, told="green", acted_at=0.0)
    if verdict.level == "green" or (verdict.level == "yellow" and verdict.severity < WORSE * state.acted_at):
        return None, state
    action = _next_action(router.guard, state, verdict.level)
    if action is None:
        if RANK[verdict.level] <= RANK[state.told]:
            return None, state
        left = "more " if state.done else ""
        detail = f"router.guard.action holds nothing {left}for this level"
        return _event(verdict, "none", detail), replace(state, told=verdict.level)
    after = replace(state, recent=(), done=(*state.done, action), told="green", acted_at=max(verdict.severity, 1.0))
    return _event(verdict, action, _detail(router, action, before=state, after=after)), after


def in_force(router: Router, state: GuardState) -> InForce:
    """The router's settings after the actions that were done."""
    lowered = router.guard.lower_lr_to ** state.done.count("lower_lr")
    return InForce(
        trains=not state.frozen,
        lr_scale=router.lr_scale * lowered,
        balance=max(router.balance, router.guard.balance) if "balance" in state.done else router.balance,
        bias_rate=max(router.bias_rate, router.guard.bias) if "bias" in state.done else router.bias_rate,
    )


def _next_action(guard: Guard, state: GuardState, level: Level) -> Action | None:
    left = list(state.done)
    for action in guard.action:
        if action in left:
            left.remove(action)
        elif RANK[ANSWERS[action]] <= RANK[level] and _changes_something(action, state):
            return action
    return None


def _changes_something(action: Action, state: GuardState) -> bool:
    """A router that stands still has no learning rate to lower, and one that never trained is that of step 0."""
    if action in ("lower_lr", "freeze"):
        return not state.frozen
    return action != "reset" or state.trains


def _guard_froze(done: Sequence[Action]) -> bool:
    """A balance loss cannot reach a frozen router, so switching it on lets the router train again."""
    for action in reversed(done):
        if action in ("freeze", "balance"):
            return action == "freeze"
    return False


def _event(verdict: Verdict, action: str, detail: str) -> GuardActed:
    return GuardActed(
        step=verdict.step, level=verdict.level, reasons=list(verdict.reasons), action=action, detail=detail
    )


def _detail(router: Router, action: Action, *, before: GuardState, after: GuardState) -> str:
    was, now = in_force(router, before), in_force(router, after)
    if action == "lower_lr":
        return f"router learning rate from {was.lr_scale:g} to {now.lr_scale:g} of train.lr"
    if action == "freeze":
        return "the router no longer trains"
    if action == "balance":
        thawed = f"; the router trains again, at {now.lr_scale:g} of train.lr" if before.frozen and now.trains else ""
        return f"weight of the balance loss from {was.balance:g} to {now.balance:g}{thawed}"
    if action == "bias":
        return f"rate of the bias update from {was.bias_rate:g} to {now.bias_rate:g}"
    if action == "rollback":
        data = "skipped" if router.guard.after_rollback == "skip" else "taken again"
        step = before.healthy_step
        return f"back to the newest checkpoint up to step {step}, the last healthy one; the data since then is {data}"
    if action == "reset":
        return "the router's weights are those of step 0 again"
    return "the run ends here"


def state_to_json(state: GuardState) -> dict[str, Any]:
    """The state as plain JSON values."""
    return asdict(state)


def state_from_json(saved: dict[str, Any]) -> GuardState:
    """The state that `state_to_json` wrote. Raises TypeError or KeyError for anything else."""
    first = saved["first"]
    return GuardState(
        **saved
        | {
            "first": RouterHealth(**first) if first else None,
            "recent": tuple(RouterHealth(**look) for look in saved["recent"]),
            "done": tuple(saved["done"]),
        }
    )
