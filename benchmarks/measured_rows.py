"""Rows of measured_memory.csv: read, told apart by what was measured, and divided into a fit half and the rest."""

import csv
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from measured_jobs import job_of

from gatewright.planner.job import Job
from gatewright.spec.plan import Metric

ROWS = Path(__file__).parent / "data" / "measured_memory.csv"


@dataclass(frozen=True)
class Row:
    """One measured run."""

    fields: dict[str, str]
    job: Job | None
    metric: Metric
    stage: int | None
    """Pipeline stage whose rank was logged; None: the most loaded."""
    problem: str = ""
    """Why no job could be made."""

    @property
    def peak_gib(self) -> float:
        return float(self.fields["peak_gib"])

    @property
    def exact(self) -> bool:
        return self.fields["quality"] in "AB"

    @property
    def bound(self) -> bool:
        """A requirement or a marketing figure, not a measurement."""
        return self.fields["quality"] == "D"

    @property
    def moe(self) -> bool:
        return "moe" in self.fields["arch"]

    @property
    def cell(self) -> tuple[str, str, str, str]:
        fields = self.fields
        ranks = "1 GPU" if fields["world_size"] == "1" else "many"
        return (source_framework(fields), fields["model"], fields["method"], ranks)


def read_rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [read_row(fields) for fields in csv.DictReader(file)]


def source_framework(fields: dict[str, str]) -> str:
    """The tool behind a row, without version and benchmark."""
    name = fields["framework"].split(" / ")[0]
    known = ("litgpt", "Megatron-Bridge", "Megatron-LM", "Megatron-SWIFT", "ms-swift", "NeMo AutoModel", "PEFT")
    return next((tool for tool in known if name.startswith(tool)), re.split(r" [/(0-9]", name)[0].strip())


def fit_pairs(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """(framework, model) pairs that constants may be fitted on: of each framework the half with the lowest hashes.

    A framework with one pair is fitted on it; an odd pair out goes to the other half.
    """
    by_tool: dict[str, set[str]] = {}
    for row in rows:
        by_tool.setdefault(source_framework(row.fields), set()).add(row.fields["model"])
    chosen: set[tuple[str, str]] = set()
    for tool, models in by_tool.items():
        ordered = sorted(models, key=lambda model: hashlib.sha256(f"{tool}|{model}".encode()).digest())
        chosen.update((tool, model) for model in ordered[: max(1, len(ordered) // 2)])
    return chosen


def read_row(fields: dict[str, str]) -> Row:
    metric = metric_of(fields)
    last = "rank logged: last" in fields["metric"] or "last stage" in fields["note"]
    try:
        job = job_of(fields)
    except ValueError as problem:
        return Row(fields=fields, job=None, metric=metric, stage=None, problem=str(problem))
    return Row(fields=fields, job=job, metric=metric, stage=job.layout.pp - 1 if last else None)


def metric_of(fields: dict[str, str]) -> Metric:
    text = fields["metric"].lower()
    if "post-optimizer peak" in text or text.startswith("rank0 measured peak"):
        return "allocated"
    if "nvidia-smi" in text or "works on" in text or text == "comment":
        return "device"
    if "allocated" in text or text in ("peak_vram_gb", "peak gpu (script)", "peak gpu"):
        return "allocated"
    return "reserved"
