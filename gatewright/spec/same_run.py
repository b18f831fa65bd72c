"""Which settings make two runs the same one: what a resumed run may change, and what it may not."""

from typing import Any

from gatewright.spec.read import diff_runs
from gatewright.spec.run import Run

MAY_CHANGE = (
    "train.save_every_steps",
    "train.save_in_background",
    "train.keep_checkpoints",
    "train.threads",
    "evaluate.",
    "evaluate",
    "parallel.",
    "parallel",
    "router.placement",
    "track",
    "runs_dir",
    "hardware",
    "cluster",
)
"""Fields that a resumed run may change: none of them moves a weight (layout and placement: by more than rounding)."""


def may_change(field: str) -> bool:
    """Whether a dotted key is, or lies below, one of those fields."""
    return any(field == free or field.startswith(f"{free.rstrip('.')}.") for free in MAY_CHANGE)


def changed(then: Run, now: Run) -> list[tuple[str, object, object]]:
    """(dotted key, then, now) of every setting that a resume must not change."""
    return [(field, before, after) for field, before, after in diff_runs(then, now) if not may_change(field)]


def what_matters(run: Run) -> dict[str, Any]:
    """The run without the fields that may change, as plain values."""
    return _without("", run.model_dump(mode="json"))


def _without(path: str, section: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in section.items():
        field = f"{path}.{name}" if path else name
        if not may_change(field):
            kept[name] = _without(field, value) if isinstance(value, dict) else value
    return kept
