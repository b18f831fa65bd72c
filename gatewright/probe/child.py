"""The child of a probe makes one measurement and writes its answer: python -m gatewright.probe.child NAME OUT JSON."""

import json
import math
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gatewright.probe.absent import Absent
from gatewright.probe.children import Wanted

Measure = Callable[[Wanted], tuple[str, Any]]
"""One line of text, and the record as plain values."""
WHERE = {
    "machine": "machine",
    "disk": "storage",
    "shm": "storage",
    "caches": "caches",
    "driver": "driver",
    "versions": "devices",
    "devices": "devices",
    "allocator": "devices",
    "attention": "attention",
    "costs": "costs",
    "four_bit": "four_bit",
    "groups": "groups",
}
"""Module that holds `measure_NAME`; only this one is imported."""


def main() -> None:
    name, out, wanted = sys.argv[1:]
    measure: Measure = getattr(import_module(f"gatewright.probe.{WHERE[name]}"), f"measure_{name}")
    try:
        text, value = measure(Wanted(**json.loads(wanted)))
        answer = {"status": "measured", "text": text, "value": finite(value)}
    except Absent as absent:
        answer = {"status": "absent", "text": str(absent), "value": None}
    except Exception as error:  # whatever a driver raises is the result
        first = str(error).strip().splitlines() or [""]
        answer = {"status": "failed", "text": f"{type(error).__name__}: {first[0]}", "value": None}
    Path(out).write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")


def finite(value: Any) -> Any:
    """Numbers that JSON cannot say become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
