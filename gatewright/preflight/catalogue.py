"""The rules by code: every family in reading order."""

from gatewright.preflight.fault import Rule
from gatewright.preflight.rules import (
    adapters,
    batch,
    environment,
    files,
    layout,
    memory,
    packing,
    probe,
    probe_node,
    resume,
    router,
    slurm,
    stages,
    weights,
)

FAMILIES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("files", files.RULES),
    ("layout", layout.RULES),
    ("resume", resume.RULES),
    ("adapters", adapters.RULES),
    ("router", router.RULES),
    ("memory", memory.RULES),
    ("batch", batch.RULES),
    ("packing", packing.RULES),
    ("slurm", slurm.RULES),
    ("environment", environment.RULES),
    ("stages", stages.RULES),
    ("weights", weights.RULES),
    ("probe", (*probe.RULES, *probe_node.RULES)),
)
RULES: tuple[Rule, ...] = tuple(rule for _, rules in FAMILIES for rule in rules)
FAMILY = {rule.code: family for family, rules in FAMILIES for rule in rules}


def find_rule(name: str) -> Rule | None:
    """The rule of this code or name."""
    wanted = name.strip().lower()
    return next((rule for rule in RULES if wanted in (rule.code.lower(), rule.name)), None)
