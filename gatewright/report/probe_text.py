"""What a machine was measured to do, as a table that fits 100 columns."""

import textwrap

from gatewright.spec.probe import Outcome, Probe

WIDTH = 100
SIGNS = {"measured": "ok", "failed": "failed", "hung": "hung", "absent": "-"}
TITLES = {
    "machine": "CPU, memory",
    "versions": "versions",
    "devices": "GPUs",
    "driver": "driver",
    "attention": "attention",
    "costs": "costs",
    "allocator": "allocator",
    "four_bit": "4 bits",
    "groups": "groups",
    "disk": "disk",
    "shm": "/dev/shm",
    "caches": "caches",
}
INDENT = 21


def render_probe(probe: Probe) -> str:
    """All measurements, and one line that counts them."""
    lines = [f"{probe.host}, {probe.time}", ""]
    lines += [line for outcome in probe.outcomes for line in outcome_lines(outcome)]
    counts = {sign: sum(outcome.status == sign for outcome in probe.outcomes) for sign in SIGNS}
    said = ", ".join(f"{count} {sign}" for sign, count in counts.items() if count)
    return "\n".join([*lines, "", said]) + "\n"


def outcome_lines(outcome: Outcome) -> list[str]:
    head = f"{TITLES[outcome.name]:<12s} {SIGNS[outcome.status]:<7s} "
    body = textwrap.wrap(outcome.text, WIDTH - INDENT, break_long_words=True) or [""]
    return [head + body[0], *(" " * INDENT + line for line in body[1:])]
