"""What frameworks print when they fail, one case a line with the kind it is: none of them may be called another one."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gatewright.doctor.diagnosis import diagnose

CASES = [json.loads(line) for line in (Path(__file__).parent / "doctor_wordings.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['kind']}" for case in CASES])
def test_a_wording_is_told_by_its_kind(case: dict[str, Any]) -> None:
    found = diagnose([], stdin=io.BytesIO(case["message"].encode()))
    if found.root is not None:
        assert found.root.kind == case["kind"], found.root.text
    else:
        assert case["kind"] == ("unknown" if found.verdict == "failed" else found.verdict)
