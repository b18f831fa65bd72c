"""Damaged logs never crash the doctor or hold it up; GATEWRIGHT_FUZZ=10000 tries so many (GATEWRIGHT_FUZZ_SEED)."""

import io
import os
import random
import time
from pathlib import Path

from doctor_faults import HARMLESS, PLANTED
from rich.console import Console

from gatewright.doctor.diagnosis import diagnose, to_json
from gatewright.doctor.source import LogError
from gatewright.doctor.text import WIDTH, render_text

COUNT = int(os.environ.get("GATEWRIGHT_FUZZ", "150"))
SLOWEST_S = 5.0
SEEDS = [
    *PLANTED.values(),
    *HARMLESS.splitlines(),
    *(Path(__file__).parent / "doctor_failed.log").read_text().splitlines(),
]
JUNK = [
    b"\x00" * 40,
    b"\xff\xfe",
    b"\x1b[",
    b"\x1b]8;;",
    b"\r",
    b"\r\n",
    b"\x1e\n",
    b"(" * 300,
    b"9" * 400,
    b"[[" * 99,
    b"nan",
    b"'" * 50,
]


def damaged(chance: random.Random) -> bytes:
    """A log of planted lines, then cut, repeated, shuffled and sprinkled with junk."""
    lines = [chance.choice(SEEDS).encode() for _ in range(chance.randrange(1, 40))]
    text = bytearray(chance.choice([b"\n", b"\r\n", b"\r", b" ", b"\n\n"]).join(lines))
    for _ in range(chance.randrange(12)):
        at = chance.randrange(len(text) + 1)
        what = chance.randrange(5)
        if what == 0:
            text[at : at + chance.randrange(30)] = chance.choice(JUNK)
        elif what == 1:
            del text[at : at + chance.randrange(200)]
        elif what == 2:
            text[at:at] = text[max(0, at - 300) : at] * chance.randrange(1, 30)
        elif what == 3:
            text[at:at] = chance.randbytes(chance.randrange(60))
        else:
            text[at : at + 1] = chance.choice([b"\n", b" ", b"0", b"'", b"{", b":"])
    return bytes(text)


def test_no_damage_makes_it_crash_or_hang() -> None:
    chance = random.Random(int(os.environ.get("GATEWRIGHT_FUZZ_SEED", "7")))
    console = Console(width=WIDTH, file=io.StringIO())
    slowest = 0.0
    for _ in range(COUNT):
        data = damaged(chance)
        began = time.process_time()
        try:
            found = diagnose([], stdin=io.BytesIO(data))
        except LogError:
            continue
        console.print(render_text(found))
        assert to_json(found)["lines"] >= 0
        slowest = max(slowest, time.process_time() - began)
    assert slowest < SLOWEST_S
