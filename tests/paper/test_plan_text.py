"""The printed plan: golden, narrow, with the answer first."""

import json
import re
from pathlib import Path

import pytest

from gatewright.planner.ask import ask
from gatewright.planner.catalogue import find_gpu, find_shape, gpus
from gatewright.planner.job import Job
from gatewright.planner.plan import compare, plan, which_gpus
from gatewright.planner.search import Question
from gatewright.planner.time import calibrated, estimate_time
from gatewright.report.plan_text import WIDTH, as_json, bar, render_comparison, render_fewest, render_plan
from gatewright.spec.hardware import Cluster, Node
from gatewright.spec.plan import Part, Phase

GOLDEN = Path(__file__).parents[1] / "golden"


def fits() -> str:
    answer = plan(
        "Qwen3-235B-A22B", gpu="h200", gpus=8, rank=32, targets=("attention", "experts"), storage="fp8",
        tokens=8192, hours=72, price=4.54,
    )  # fmt: skip
    return render_plan(answer)


def does_not_fit() -> str:
    return render_plan(plan("DeepSeek-V4-Pro", gpu="h200", gpus=4, rank=16))


def compared() -> str:
    question = ask("Qwen3-30B-A3B", gpu="h200", rank=32, targets=("attention", "experts"), hours=10)
    return render_comparison(compare(question, gpus=1, methods=("lora", "qlora", "full")))


GOLDENS = {"plan_fits.txt": fits, "plan_too_large.txt": does_not_fit, "plan_compare.txt": compared}


@pytest.mark.parametrize(("name", "text"), GOLDENS.items())
def test_golden(name: str, text) -> None:  # type: ignore[no-untyped-def]
    """Regenerate on purpose: python tests/paper/test_plan_text.py"""
    assert text() == (GOLDEN / name).read_text(encoding="utf-8")


def test_the_answer_is_in_the_first_line_and_no_line_is_wide() -> None:
    for text in (
        fits(),
        does_not_fit(),
        compared(),
        render_plan(plan("Qwen3-8B", gpu="h100", method="full"), explain=True),
    ):
        assert text.startswith(("fits: ", "does not fit: "))
        assert max(map(len, text.splitlines())) <= WIDTH
        assert "nan" not in text.lower() and not re.search(r" -\d", text)


def test_explain_puts_numbers_into_formulas() -> None:
    text = render_plan(plan("Qwen3-8B", gpu="h100", method="full"), explain=True)
    assert "8,190,735,360 × 2 B" in text and "294,912 B a token × 4,096 tokens" in text


def test_json_carries_derived_figures_and_no_nan() -> None:
    answer = plan("Qwen3-8B", gpu="h100", method="full", hours=10, price=2.0)
    document = json.loads(json.dumps(as_json(answer), allow_nan=False))
    assert document["fits"] and document["chosen"]["cost"]["usd"] == 20.0
    assert document["chosen"]["memory"]["peak"] == "loss" and document["chosen"]["time"]["step_s"] > 0


def test_fewest_of_each_gpu_is_a_line_with_its_price() -> None:
    job = Job(shape=find_shape("Qwen3-8B"), method="full", loss="linear")
    question = Question(job=job, gpu=find_gpu("h100"), per_node=8, tokens_per_step=65536)
    lines = render_fewest(which_gpus(question)).splitlines()
    assert len(lines) == len(gpus()) + 2 and any(line.startswith("h200") and "1" in line for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_a_bar_never_grows_past_its_width() -> None:
    phase = Phase(name="loss", parts=(Part(name="frozen weights", bytes=333), Part(name="logits and loss", bytes=667)))
    assert len(bar(phase, 1000)) == 44 and "·" not in bar(phase, 1000)


def test_a_measured_step_replaces_the_assumed_efficiency() -> None:
    job = Job(shape=find_shape("Qwen3-8B"), method="full")
    cluster = Cluster(node=Node(gpu=find_gpu("h100"), gpus=1))
    known = calibrated(job, cluster, tokens_per_step=65536, measured_step_s=12.0)
    again = estimate_time(job, cluster, tokens_per_step=65536, efficiency=known)
    assert again.step_s == pytest.approx(12.0, rel=0.02) and "measured" in again.efficiency_source


if __name__ == "__main__":
    for name, text in GOLDENS.items():
        (GOLDEN / name).write_text(text(), encoding="utf-8")
