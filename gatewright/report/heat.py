"""Expert loads as a map of colours: a symmetric scale of octaves around the fair share, marks for the dead."""

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from gatewright.report.loads import STARVED

OCTAVES = 2
"""Loads from 1/4 to 4 have colours of their own; beyond, the last one is used. No token at all has its own."""
SHADES = 6 * OCTAVES
"""Colours on each side of the fair share, a sixth of an octave each."""
DEAD = "dead"


def shade(load: float) -> str:
    """Colour of a load: sixths of an octave from the fair share, -SHADES to SHADES, or DEAD."""
    if load <= 0:
        return DEAD
    return str(max(-SHADES, min(SHADES, round(SHADES / OCTAVES * math.log2(load)))))


def heat(rows: Sequence[Sequence[float]], *, row_name: str, marks: bool = True) -> str:
    """A map of loads, one row a line of cells; a dead expert is crossed, a starved one struck through.

    `row_name` tells the tooltip which rows of the figure's data these are.
    """
    cells: dict[str, list[str]] = {}
    dead, starved = [], []
    for down, loads in enumerate(rows):
        right = 0
        for colour, run in groupby(loads, key=shade):
            width = len(list(run))
            cells.setdefault(colour, []).append(f"M{right} {down}h{width}v1h-{width}z")
            right += width
        for right, load in enumerate(loads):
            if load == 0:
                dead.append(f"M{right}.2 {down}.2l.6.6m0-.6l-.6.6")
            elif load < STARVED:
                starved.append(f"M{right}.2 {down}.5h.6")
    columns = len(rows[0])
    paths = "".join(f'<path class="q{colour}" d="{"".join(d)}"/>' for colour, d in cells.items())
    if columns <= 64:
        paths += f'<path class="seam" d="{"".join(f"M{right} 0v{len(rows)}" for right in range(1, columns))}"/>'
    if marks:
        paths += "".join(f'<path class="cross" d="{"".join(d)}"/>' for d in (dead, starved) if d)
    return (
        f'<svg class="heat" viewBox="0 0 {columns} {len(rows)}" preserveAspectRatio="none" aria-hidden="true" '
        f'data-rows="{escape(row_name)}" style="--columns:{columns};--rows:{len(rows)}">{paths}</svg>'
    )


def heat_legend() -> str:
    """The colours of the loads with their numbers, and the two marks."""
    words = {-2: "≤ ¼", -1: "½", 0: "1", 1: "2", 2: "≥ 4"}
    ramp = "".join(f'<path class="q{c}" d="M{c + SHADES} 0h1v1h-1z"/>' for c in range(-SHADES, SHADES + 1))
    ticks = "".join(
        f'<span style="left:{100 * (SHADES / OCTAVES * octave + SHADES + 0.5) / (2 * SHADES + 1):.2f}%">{word}</span>'
        for octave, word in words.items()
    )
    return (
        '<div class="scale"><div class="ramp"><svg viewBox="0 0 25 1" preserveAspectRatio="none" aria-hidden="true">'
        f'{ramp}</svg>{ticks}</div><span class="scale-note">times the fair share'
        f"{_key(DEAD, 'M.2.2l.6.6m0-.6l-.6.6', 'dead: no token')}"
        f"{_key(str(-SHADES), 'M.2.5h.6', 'starved: under 10 % of the fair share')}</span></div>"
    )


def _key(colour: str, cross: str, words: str) -> str:
    cell = f'<path class="q{colour}" d="M0 0h1v1h-1z"/><path class="cross" d="{cross}"/>'
    return f' <b><svg class="mark-key" viewBox="0 0 1 1" aria-hidden="true">{cell}</svg> {words}</b>'


def shade_rules(under: str, even: str, over: str) -> str:
    """CSS that colours every shade between three colours given as #rrggbb."""
    rules = []
    for colour in range(-SHADES, SHADES + 1):
        part = (abs(colour) / SHADES) ** 0.8  # small deviations are what routing has: spread them
        mixed = [
            round(a + (b - a) * part) for a, b in zip(_rgb(even), _rgb(over if colour > 0 else under), strict=True)
        ]
        rules.append(f".q{colour} {{ fill: #{bytes(mixed).hex()} }}\n")
    return "".join(rules)


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))
