"""docs/doctor.md is what --explain prints, page after page; run this file with --write to renew it."""

import sys
from pathlib import Path

import pytest

from gatewright.doctor.cause import Cause
from gatewright.doctor.table import CAUSES, explain, pages
from gatewright.spec.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
HEAD = """\
# What the doctor knows

`gatewright doctor LOG…` reads the output of a run (files, folders, gzip, or standard input) and names the root of
a failure first: the lines it rests on, the numbers read, how sure it is, and what to change. What only follows from
the root comes after it. Where nothing in this table explains the end, it says so and shows the earliest suspicious
lines.

`gatewright doctor --explain CODE` prints one of these pages. The table is `gatewright/doctor/causes/`, one file a
family; a cause is one entry with its signs, its sentence and its fix. `benchmarks/doctor_accuracy.py` scores it on
labelled failures.

How sure: *certain* means that the line says it; *likely*, that it is the usual reason of what the line says;
*possible*, that the log fits it and other reasons too.

"""


def test_the_pages_are_those_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == HEAD + pages()


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.code)
def test_every_cause_has_a_page_by_code_and_by_name(cause: Cause) -> None:
    page = explain(cause.code.lower())
    assert page == explain(cause.name)
    assert cause.code in page and cause.title in page and cause.why in page and cause.fix[0] in page


def test_an_unknown_code_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean GW5"):
        explain("GW50S")
    with pytest.raises(UserError, match="oom-fragmentation"):
        explain("oom-fragmentatoin")


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(HEAD + pages(), encoding="utf-8")
