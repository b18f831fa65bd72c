"""Lets the tests of many ranks use the tiny models of tests/metal."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "metal"))
