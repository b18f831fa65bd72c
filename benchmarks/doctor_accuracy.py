"""How often the doctor is right, on labelled failures: beside gpualert (PyPI) and the 2-GiB rule, in the same run.

data/failures.jsonl holds cases from public threads (`source`); their out-of-memory sentences are rendered from the
numbers reported there, other messages are machine output with names and paths made generic. Each was labelled by hand
(`kind`, and `oom_cause` for out-of-memory): `diagnosis_basis` says whether the thread confirmed it.

A case counts where it has a message, that is, where `message_basis` is not a summary in somebody's words. Right: the
kind of the root is the label. Unknown: the doctor names no cause. Wrong: another kind.

The cases are split by a hash of their ids. The rules were written with the texts of one half in view. Of the other half
no text was read; the first score on it was 57 of 64 kinds (2 wrong) and 12 of 18 causes. After that the labels it
missed, not their texts, and for one threshold (ABSURD_RATIO) two ratios were looked at, so its later figures flatter.
"""

import argparse
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatewright.doctor.diagnosis import diagnose
from gatewright.doctor.oom_sentence import parse_oom

try:
    from gpualert.parse_errors import parse_errors
except ImportError:
    parse_errors = None

CASES = Path(__file__).parent / "data" / "failures.jsonl"
UNKNOWN = "unknown"
GIB = 2**30
GPUALERT_KINDS = {
    "GPU out-of-memory": (
        "gpu_oom",
        "gpu_oom_resume",
        "gpu_oom_eval",
        "gpu_oom_save",
        "gpu_oom_merge",
        "gpu_oom_masked",
    ),
    "NCCL communication error": ("nccl_timeout", "nccl_remote", "nccl_error", "rccl_hang", "zero3_moe_hang"),
    "CUDA runtime error": ("device_assert", "gpu_fault_xid", "gpu_invalid_device_function", "illegal_memory_access"),
    "System out-of-memory": ("host_oom", "host_oom_merge"),
    "Process killed by OS": ("host_oom", "host_oom_merge"),
    "Segmentation fault": ("segfault",),
    "File not found": ("resume_not_found",),
    "Permission denied": ("permission",),
    "Missing Python module": ("library_missing", "flash_attn", "bitsandbytes_rocm"),
    "NaN detected": ("loss_nan",),
}
"""gpualert's label → our kinds that it may mean; its labels for any traceback count as unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    kinds: tuple[str, ...]
    """Kinds the answer may mean; empty: unknown."""
    cause: str = ""
    """Cause within out-of-memory."""
    said: str = ""


def ask_gatewright(message: str) -> Answer:
    diagnosis = diagnose([], stdin=io.BytesIO(message.encode()))
    root = diagnosis.root
    if root is None or root.kind == UNKNOWN:
        return Answer(kinds=())
    return Answer(kinds=(root.kind,), cause=str(root.number.get("cause", "")), said=f"{root.code} {root.text}")


def ask_gpualert(message: str) -> Answer:
    label = parse_errors("", message, 1)
    kinds = next((kinds for name, kinds in GPUALERT_KINDS.items() if label.startswith(name)), ())
    return Answer(kinds=kinds, said=label.partition("\n")[0])


def ask_two_gib_rule(message: str) -> Answer:
    """The published rule: over 2 GiB reserved but unallocated means fragmentation, else pressure."""
    oom = parse_oom(message)
    if oom is None or oom.unallocated_bytes is None:
        return Answer(kinds=())
    return Answer(kinds=("gpu_oom",), cause="fragmentation" if oom.unallocated_bytes > 2 * GIB else "pressure")


def looked_at(case: dict[str, Any]) -> bool:
    """Whether the case is in the half that the rules were written with."""
    return hashlib.sha256(case["id"].encode()).digest()[0] % 2 == 0


def score(cases: Sequence[dict[str, Any]], ask: Callable[[str], Answer]) -> dict[str, Any]:
    """Counts over the cases: kinds, and causes of the out-of-memory cases that have one."""
    right = wrong = unknown = 0
    cause_right = cause_all = found = fragmented = alarms = 0
    missed: list[dict[str, str]] = []
    for case in cases:
        answer = ask(case["message"])
        verdict = "unknown" if not answer.kinds else "right" if case["kind"] in answer.kinds else "wrong"
        right, wrong, unknown = (
            right + (verdict == "right"),
            wrong + (verdict == "wrong"),
            unknown + (verdict == "unknown"),
        )
        cause = case.get("oom_cause")
        if cause:
            cause_all += 1
            cause_right += answer.cause == cause
            fragmented += cause == "fragmentation"
            found += cause == answer.cause == "fragmentation"
            alarms += answer.cause == "fragmentation" and cause not in ("fragmentation", "mixed")
        if verdict != "right" or (cause and cause != answer.cause):
            label = case["kind"] + (f"/{cause}" if cause else "")
            missed.append({"id": case["id"], "label": label, "said": f"{verdict} {answer.cause} {answer.said}".strip()})
    return {
        "cases": len(cases),
        "right": right,
        "wrong": wrong,
        "unknown": unknown,
        "oom_cases": cause_all,
        "oom_cause_right": cause_right,
        "fragmented": fragmented,
        "fragmentation_found": found,
        "fragmentation_false_alarms": alarms,
        "missed": missed,
    }


def read_cases(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if row["message"] and row["message_basis"] != "summary"]


def show(name: str, result: dict[str, Any]) -> None:
    cases, causes = max(1, result["cases"]), max(1, result["oom_cases"])
    print(
        f"{name:<28} kind: {result['right']:>3} right ({result['right'] / cases:6.1%}) {result['wrong']:>3} wrong "
        f"({result['wrong'] / cases:5.1%}) {result['unknown']:>3} unknown of {result['cases']}"
    )
    print(
        f"{'':<28} OOM cause: {result['oom_cause_right']} of {result['oom_cases']} "
        f"({result['oom_cause_right'] / causes:.1%}); fragmentation {result['fragmentation_found']} of "
        f"{result['fragmented']}, {result['fragmentation_false_alarms']} false alarms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=Path, default=CASES, help="labelled cases, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--missed", choices=("looked-at", "all"), help="also print the cases that are not right")
    options = parser.parse_args()
    cases = read_cases(options.cases)
    halves = {
        "all": cases,
        "looked-at half": [c for c in cases if looked_at(c)],
        "held half": [c for c in cases if not looked_at(c)],
    }
    results = {f"doctor, {name}": score(part, ask_gatewright) for name, part in halves.items()}
    if parse_errors is not None:
        results["gpualert, all"] = score(cases, ask_gpualert)
    results["2-GiB rule, all"] = score(cases, ask_two_gib_rule)
    if options.json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
        return
    for name, result in results.items():
        show(name, result)
    if parse_errors is None:
        print("gpualert: not installed (pip install gpualert), so it is not compared")
    if options.missed:
        name = "doctor, looked-at half" if options.missed == "looked-at" else "doctor, all"
        for one in results[name]["missed"]:
            print(f"  {one['id']:<24} {one['label']:<32} {one['said'][:160]}")


if __name__ == "__main__":
    main()
