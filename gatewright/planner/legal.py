"""Legality: which combinations of method, layout and backend fail, and which are unwise; preflight asks here too."""

from collections.abc import Iterable

from gatewright.planner.legal_advice import ADVICE
from gatewright.planner.legal_errors import ERRORS
from gatewright.planner.legal_ours import OURS
from gatewright.planner.legal_rule import Rule, Setting
from gatewright.spec.plan import Refusal

FORBIDDEN: tuple[Rule, ...] = (*ERRORS, *OURS)
RULES: tuple[Rule, ...] = (*FORBIDDEN, *ADVICE)


def refusals(setting: Setting) -> tuple[Refusal, ...]:
    """The rules of its backend that forbid the setting."""
    return broken(FORBIDDEN, setting)


def advice(setting: Setting) -> tuple[Refusal, ...]:
    """The rules of its backend that would have it changed, though it works."""
    return broken(ADVICE, setting)


def broken(rules: Iterable[Rule], setting: Setting) -> tuple[Refusal, ...]:
    reasons = ((rule, rule.broken(setting)) for rule in rules if not rule.backends or setting.backend in rule.backends)
    return tuple(Refusal(rule=rule.id, reason=reason, backend=rule.holds_for) for rule, reason in reasons if reason)
