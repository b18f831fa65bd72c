"""The planner's margin set without the pair it is judged on: every (framework, model) pair is left out once.

    python benchmarks/planner_left_out.py [--rows FILE.csv]

The margin of a group is the smallest in steps of half a per cent that holds four of five of its rows. Groups: the tool
whose runs are published to the byte, and the rest by metric.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from planner_accuracy import ROWS, Scored, read_rows, score, source_framework

from gatewright.planner.policy import find_policy

HOLDS = 0.8
STEP = 0.005
MOST = 0.3


def pair(item: Scored) -> tuple[str, str]:
    return source_framework(item.row.fields), item.row.fields["model"]


def group(item: Scored) -> str:
    return "fms" if source_framework(item.row.fields) == "fms-hf-tuning" else item.row.metric


def plain_error(item: Scored) -> float:
    """Without the margin that the policy adds."""
    assert item.row.job is not None
    policy, moe = find_policy(item.row.job.framework), item.row.job.shape.is_moe
    if item.row.metric == "allocated":
        margin = policy.margin_moe if moe else policy.margin
    else:
        margin = policy.reserved_margin_moe if moe else policy.reserved_margin
    return (1 + item.error) / (1 + margin) - 1


def margin_of(errors: Sequence[float]) -> float:
    """Smallest margin that holds four of five."""
    margin = 0.0
    while margin < MOST and sum((1 + error) * (1 + margin) < 1 for error in errors) > (1 - HOLDS) * len(errors):
        margin += STEP
    return margin


def left_out(scored: Sequence[Scored]) -> list[tuple[Scored, float]]:
    """Each row with its error under the margin of the other pairs."""
    judged = []
    for out in sorted({pair(item) for item in scored}):
        margins: dict[str, float] = {}
        for item in scored:
            if pair(item) != out:
                continue
            name = group(item)
            if name not in margins:
                margins[name] = margin_of(
                    [plain_error(other) for other in scored if group(other) == name and pair(other) != out]
                )
            judged.append((item, (1 + plain_error(item)) * (1 + margins[name]) - 1))
    return judged


def line(name: str, errors: Sequence[float]) -> str:
    under = sum(error < 0 for error in errors) / len(errors)
    return f"{name:20s}{len(errors):5d}{statistics.median(map(abs, errors)):8.1%}{under:7.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    scored = [item for item in score(read_rows(parser.parse_args().rows)) if item.row.exact]
    judged = left_out(scored)
    print(f"{len({pair(item) for item in scored})} pairs, each left out once")
    print(f"{'':20s}{'rows':>5s}{'median':>8s}{'under':>7s}")
    print(line("A and B rows", [error for _, error in judged]))
    for name in ("fms", "allocated", "reserved"):
        if errors := [error for item, error in judged if group(item) == name]:
            print(line(name, errors))
    print(line("MoE", [error for item, error in judged if item.row.moe]))
    print(line("not fms", [error for item, error in judged if group(item) != "fms"]))


if __name__ == "__main__":
    main()
