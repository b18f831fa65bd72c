"""The estimate against runs that others measured, and the rules of the comparison itself."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from measured_models import find_shape as model_of  # noqa: E402
from measured_rows import ROWS, fit_pairs, read_rows, source_framework  # noqa: E402
from planner_accuracy import Scored, as_json, compare_peers, report, score, summarise  # noqa: E402

from gatewright.planner.memory import estimate_memory  # noqa: E402


@pytest.fixture(scope="module")
def scored() -> list[Scored]:
    return score(read_rows(ROWS))


def summary(scored: list[Scored], test) -> object:  # type: ignore[no-untyped-def]
    found = summarise("", [item for item in scored if item.row.exact and test(item)])
    assert found is not None
    return found


def test_targets_hold_on_the_projects_rows(scored: list[Scored]) -> None:
    everything = summary(scored, lambda item: True)
    assert everything.median_abs_error <= 0.08  # type: ignore[attr-defined]
    assert everything.under <= 0.20  # type: ignore[attr-defined]
    assert everything.covered >= 0.90  # type: ignore[attr-defined]
    allocated = summary(scored, lambda item: item.row.metric == "allocated")
    assert allocated.median_abs_error <= 0.05  # type: ignore[attr-defined]
    moe = summary(scored, lambda item: item.row.moe)
    assert moe.median_abs_error <= 0.12  # type: ignore[attr-defined]


def test_the_half_no_constant_was_set_on_is_not_much_worse(scored: list[Scored]) -> None:
    assert summary(scored, lambda item: not item.fit).median_abs_error <= 0.08  # type: ignore[attr-defined]


def test_at_most_half_of_the_pairs_are_fitted_on() -> None:
    rows = read_rows(ROWS)
    pairs = {(source_framework(row.fields), row.fields["model"]) for row in rows}
    assert len(fit_pairs(rows)) <= len(pairs) / 2
    assert fit_pairs(rows) == fit_pairs(list(reversed(rows)))


def test_every_published_formula_is_further_off_on_its_own_rows(scored: list[Scored]) -> None:
    pairs = compare_peers(scored)
    assert len(pairs) == 4
    for peer, own in pairs:
        assert own.median_abs_error < peer.median_abs_error / 2, peer.name


@pytest.mark.parametrize(
    ("row", "within"),
    [
        ("478", 0.005),  # Mistral-7B, full, one GPU: the optimizer's step, 10 B a parameter
        ("557", 0.01),  # PowerLM-3B, full: the loss
        ("590", 0.01),  # Llama-3-8B, LoRA, fused loss: a block of the backward pass
        ("573", 0.01),  # PowerLM-3B, QLoRA with an fp32 residual stream
        ("701", 0.01),  # Mistral-7B, LoRA under FSDP: block gradients that frozen FSDP keeps
        ("695", 0.06),  # Mistral-7B, full under FSDP
    ],
)
def test_exact_rows_are_met_before_any_margin(row: str, within: float) -> None:
    """Peaks at each kind of moment, against max_memory_allocated to the byte."""
    found = next(item for item in read_rows(ROWS) if item.fields["id"] == row)
    assert found.job is not None
    peak = estimate_memory(found.job).peak.bytes / 2**30
    assert abs(peak / found.peak_gib - 1) <= within


def test_an_unknown_model_is_guessed_from_its_size_and_said_so() -> None:
    found = model_of("Nobody-7B", total_b=7.0, active_b=None, moe=False)
    assert found is not None and found.how == "guess" and abs(found.shape.parameters / 7e9 - 1) < 0.1
    assert model_of("Nobody", total_b=None, active_b=None, moe=False) is None


def test_rows_without_a_shape_are_listed_not_dropped(scored: list[Scored]) -> None:
    rows = read_rows(ROWS)
    text = report(rows, scored, worst=3)
    assert "not read: row 53, DeepSeek-OCR" in text and '"not_read"' in as_json(rows, scored)
    assert len(rows) == len(scored) + text.count("not read: row")
