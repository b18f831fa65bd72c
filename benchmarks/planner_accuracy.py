"""How far the planner is off on measured runs, beside the published formulas of other tools on the same rows.

    python benchmarks/planner_accuracy.py [--rows FILE.csv] [--json] [--worst N]

Rows of quality A and B are measurements with known settings, C have an unknown knob or only a cap on the length,
D are bounds. Constants of the policy table were set on at most half of the (framework, model) pairs, the `fit` half
of `fit_pairs`; `other` is the rest.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measured_rows import ROWS, Row, fit_pairs, read_rows, source_framework
from peer_formulas import PEERS

from gatewright.planner.memory import estimate_memory
from gatewright.spec.hardware import GIB
from gatewright.spec.plan import Interval


@dataclass(frozen=True)
class Scored:
    row: Row
    interval: Interval
    fit: bool

    @property
    def error(self) -> float:
        return self.interval.bytes / GIB / self.row.peak_gib - 1

    @property
    def covered(self) -> bool:
        return self.interval.low_bytes <= self.row.peak_gib * GIB <= self.interval.high_bytes


@dataclass(frozen=True)
class Summary:
    name: str
    rows: int
    median_abs_error: float
    cell_median_abs_error: float
    """Median over the cells (framework, model, method, one or many GPUs) of each cell's median."""
    bias: float
    within_10: float
    under: float
    covered: float | None


def score(rows: Iterable[Row]) -> list[Scored]:
    rows = list(rows)
    pairs = fit_pairs(read_rows(ROWS))
    return [
        Scored(
            row=row,
            interval=estimate_memory(row.job, stage=row.stage).by_metric(row.metric),
            fit=(source_framework(row.fields), row.fields["model"]) in pairs,
        )
        for row in rows
        if row.job is not None
    ]


def summarise(name: str, scored: list[Scored]) -> Summary | None:
    if not scored:
        return None
    errors = [(item.row.cell, item.error) for item in scored]
    return summary_of(name, errors, covered=sum(item.covered for item in scored) / len(scored))


def summary_of(name: str, errors: list[tuple[tuple[str, ...], float]], *, covered: float | None) -> Summary:
    cells: dict[tuple[str, ...], list[float]] = {}
    for cell, error in errors:
        cells.setdefault(cell, []).append(abs(error))
    values = [error for _, error in errors]
    return Summary(
        name=name,
        rows=len(values),
        median_abs_error=statistics.median(map(abs, values)),
        cell_median_abs_error=statistics.median(statistics.median(cell) for cell in cells.values()),
        bias=statistics.median(values),
        within_10=sum(abs(value) <= 0.1 for value in values) / len(values),
        under=sum(value < 0 for value in values) / len(values),
        covered=covered,
    )


SUBSETS: dict[str, Callable[[Scored], bool]] = {
    "A and B rows": lambda item: item.row.exact,
    "  fit half": lambda item: item.row.exact and item.fit,
    "  other half": lambda item: item.row.exact and not item.fit,
    "  allocated": lambda item: item.row.exact and item.row.metric == "allocated",
    "  reserved": lambda item: item.row.exact and item.row.metric == "reserved",
    "  MoE": lambda item: item.row.exact and item.row.moe,
    "  MoE, other half": lambda item: item.row.exact and item.row.moe and not item.fit,
    "  dense": lambda item: item.row.exact and not item.row.moe,
    "  full": lambda item: item.row.exact and item.row.job is not None and item.row.job.method == "full",
    "  LoRA": lambda item: item.row.exact and item.row.job is not None and item.row.job.method == "lora",
    "  QLoRA": lambda item: item.row.exact and item.row.job is not None and item.row.job.method == "qlora",
    "  1 GPU": lambda item: item.row.exact and item.row.fields["world_size"] == "1",
    "  many GPUs": lambda item: item.row.exact and item.row.fields["world_size"] != "1",
    "C rows": lambda item: item.row.fields["quality"] == "C",
    "A, B and C rows": lambda item: not item.row.bound,
    "D rows (bounds)": lambda item: item.row.bound,
}


def compare_peers(scored: list[Scored]) -> list[tuple[Summary, Summary]]:
    """Each peer on the A and B rows it can take, and the planner on the same rows."""
    pairs = []
    for name, formula in PEERS.items():
        errors, ours = [], []
        for item in scored:
            job = item.row.job
            estimate = formula(job) if job is not None and item.row.exact else None
            if estimate is not None:
                errors.append((item.row.cell, estimate / GIB / item.row.peak_gib - 1))
                ours.append(item)
        own = summarise("  planner, same rows", ours)
        if errors and own is not None:
            pairs.append((summary_of(name, errors, covered=None), own))
    return pairs


HEAD = f"{'':27s}{'rows':>5s}{'median':>8s}{'cells':>8s}{'bias':>8s}{'≤10 %':>7s}{'under':>7s}{'covered':>9s}"


def line(summary: Summary) -> str:
    covered = "" if summary.covered is None else f"{summary.covered:9.0%}"
    return (
        f"{summary.name:27s}{summary.rows:5d}{summary.median_abs_error:8.1%}{summary.cell_median_abs_error:8.1%}"
        f"{summary.bias:+8.1%}{summary.within_10:7.0%}{summary.under:7.0%}{covered}"
    )


def cell_lines(scored: list[Scored]) -> list[str]:
    cells: dict[tuple[str, ...], list[Scored]] = {}
    for item in scored:
        if item.row.exact:
            cells.setdefault(item.row.cell, []).append(item)
    lines = []
    for (tool, model, method, ranks), items in sorted(cells.items()):
        errors = [item.error for item in items]
        half = "fit" if items[0].fit else "other"
        error, bias = statistics.median(map(abs, errors)), statistics.median(errors)
        lines.append(
            f"{tool:17.17s} {model:30.30s} {method:8.8s} {ranks:6s}{len(items):4d}{error:8.1%}{bias:+8.1%}  {half}"
        )
    return lines


def report(rows: list[Row], scored: list[Scored], *, worst: int) -> str:
    unread = [row for row in rows if row.job is None]
    summaries = [summarise(name, [item for item in scored if test(item)]) for name, test in SUBSETS.items()]
    lines = [
        f"{len(rows)} rows, {len(scored)} read; absolute error of the estimate in the metric each row was measured in",
        "",
    ]
    lines += [HEAD, *(line(summary) for summary in summaries if summary is not None), ""]
    lines += ["published formulas, on the A and B rows each can take", HEAD]
    for peer, own in compare_peers(scored):
        lines += [line(peer), line(own)]
    lines += ["", "by cell (A and B rows): framework, model, method, GPUs, rows, median error, bias, half"]
    lines += cell_lines(scored)
    if worst:
        lines += ["", f"the {worst} rows furthest off (A and B)"]
        ranked = sorted((item for item in scored if item.row.exact), key=lambda item: -abs(item.error))
        lines += [row_line(item) for item in ranked[:worst]]
    lines += [f"not read: row {row.fields['id']}, {row.fields['model']}: {row.problem}" for row in unread]
    return "\n".join(lines)


def row_line(item: Scored) -> str:
    fields, interval = item.row.fields, item.interval
    estimate = f"{interval.bytes / GIB:7.2f} GiB {interval.metric:9s} {item.error:+7.1%}"
    return (
        f"{fields['id']:>5s} {source_framework(fields):17.17s} {fields['model']:28.28s} {fields['method']:6.6s}"
        f" measured {item.row.peak_gib:7.2f} estimated {estimate}"
    )


def as_json(rows: list[Row], scored: list[Scored]) -> str:
    summaries = [summarise(name.strip(), [item for item in scored if test(item)]) for name, test in SUBSETS.items()]
    return json.dumps(
        {
            "rows": len(rows),
            "summaries": [asdict(summary) for summary in summaries if summary is not None],
            "peers": [{"peer": asdict(peer), "planner": asdict(own)} for peer, own in compare_peers(scored)],
            "estimates": [
                {
                    "id": item.row.fields["id"],
                    "metric": item.interval.metric,
                    "measured_gib": item.row.peak_gib,
                    "estimated_gib": item.interval.bytes / GIB,
                    "low_gib": item.interval.low_bytes / GIB,
                    "high_gib": item.interval.high_bytes / GIB,
                    "quality": item.row.fields["quality"],
                    "half": "fit" if item.fit else "other",
                }
                for item in scored
            ],
            "not_read": [{"id": row.fields["id"], "why": row.problem} for row in rows if row.job is None],
        },
        indent=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV with the columns of data/measured_memory.csv")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--worst", type=int, default=10, help="rows to show of those furthest off")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    scored = score(rows)
    print(as_json(rows, scored) if arguments.json else report(rows, scored, worst=arguments.worst))


if __name__ == "__main__":
    main()
