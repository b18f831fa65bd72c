"""Every rule of `gatewright check` is broken by one config and kept by another."""

from pathlib import Path

import pytest
from preflight_case import Case, codes, verdict
from preflight_cases_layout import CASES as LAYOUT
from preflight_cases_model import CASES as MODEL
from preflight_cases_rest import CASES as REST
from test_preflight_probe import CASES as PROBE
from test_preflight_weights import CASES as WEIGHTS

from gatewright.preflight.catalogue import RULES

CASES = (*LAYOUT, *MODEL, *REST)


@pytest.mark.parametrize("case", CASES, ids=[case.code for case in CASES])
def test_a_rule_finds_the_config_that_breaks_it_and_only_that(case: Case, tmp_path: Path) -> None:
    bad = verdict(case.bad, tmp_path / "bad", case.given)
    good = verdict(case.good, tmp_path / "good", case.given)
    assert case.code in codes(bad)
    assert case.code not in codes(good)


def test_every_rule_has_a_case() -> None:
    found = [*(case.code for case in CASES), *(code for code, _, _ in WEIGHTS), *(case.code for case in PROBE)]
    assert sorted(set(found)) == sorted(rule.code for rule in RULES)
