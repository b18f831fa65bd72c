"""A plan as a picture: boxes and words with their places, for whatever draws them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gatewright.report.plan_text import (
    GROUPS,
    cost_line,
    gib,
    group_sizes,
    headline,
    layout_text,
    seconds,
    shown_candidate,
)
from gatewright.spec.hardware import GIB
from gatewright.spec.plan import PHASE_TITLES, MemoryEstimate, Plan

INK, SOFT, EMPTY = "#16191d", "#59636e", "#eef0f2"
COLOURS = ("#7a8794", "#1d5fa6", "#5b9bd5", "#c9d1d9", "#b4450b")
"""Of GROUPS, as on the page."""
WIDTH = 1000
MARGIN = 32
BAR_LEFT, BAR_RIGHT = 220, WIDTH - 110
ROW = 30
BLOCK = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Text on a baseline."""

    x: float
    y: float
    text: str
    size: int
    colour: str = INK
    anchor: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Units are pixels of a screen of usual density."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    words: tuple[Word, ...]
    background: str = "#ffffff"


def picture(plans: Sequence[Plan]) -> Picture:
    """Each plan's headline and a stacked bar a phase, all plans on one scale, with the GPU's memory marked."""
    memories = [memory_of(plan) for plan in plans]
    fullest = [max(phase.bytes for phase in memory.phases) for memory in memories if memory]
    scale = max([*fullest, *(plan.gpu_memory_bytes for plan in plans)]) * 1.02
    boxes: list[Box] = []
    words: list[Word] = []
    top = float(MARGIN)
    for plan, memory in zip(plans, memories, strict=True):
        words += heading(plan, top)
        top += BLOCK
        if memory is not None:
            boxes += bars(memory, top, scale)
            words += labels(memory, top)
            boxes.append(mark(plan, top, len(memory.phases), scale))
            top += ROW * len(memory.phases)
            words += under(plan, top, scale)
            top += ROW
        top += ROW
    keys, names = legend(top)
    return Picture(width=WIDTH, height=round(top + 40), boxes=(*boxes, *keys), words=(*words, *names))


def memory_of(plan: Plan) -> MemoryEstimate | None:
    candidate = shown_candidate(plan)
    return candidate.memory if candidate else None


def heading(plan: Plan, top: float) -> list[Word]:
    item = plan.chosen
    facts = [layout_text(plan)]
    if item is not None and item.time is not None:
        facts.append(f"{seconds(item.time.step_s)} a step of {item.time.tokens_per_step:,} tokens")
    if item is not None and item.cost is not None:
        facts.append(cost_line(item.cost).removeprefix("cost").strip().split(" (")[0])
    return [
        Word(x=MARGIN, y=top + 20, text=headline(plan), size=21),
        Word(x=MARGIN, y=top + 45, text=f"{plan.model}: {plan.method}", size=15, colour=SOFT),
        Word(x=MARGIN, y=top + 68, text="; ".join(facts), size=15, colour=SOFT),
    ]


def across(size: float, scale: float) -> float:
    return BAR_LEFT + (BAR_RIGHT - BAR_LEFT) * size / scale


def bars(memory: MemoryEstimate, top: float, scale: float) -> list[Box]:
    boxes = []
    for row, phase in enumerate(memory.phases):
        above, below = top + ROW * row, top + ROW * row + ROW - 8
        boxes.append(Box(left=BAR_LEFT, top=above, right=BAR_RIGHT, bottom=below, colour=EMPTY))
        total = 0
        for colour, size in zip(COLOURS, group_sizes(phase), strict=True):
            left, total = across(total, scale), total + size
            boxes.append(Box(left=left, top=above, right=across(total, scale), bottom=below, colour=colour))
    return boxes


def labels(memory: MemoryEstimate, top: float) -> list[Word]:
    words = []
    for row, phase in enumerate(memory.phases):
        y = top + ROW * row + 16
        name = PHASE_TITLES[phase.name] + (", the peak" if phase is memory.peak else "")
        words.append(Word(x=MARGIN, y=y, text=name, size=15))
        words.append(Word(x=WIDTH - MARGIN, y=y, text=f"{gib(phase.bytes)} GiB", size=15, anchor="right"))
    return words


def mark(plan: Plan, top: float, rows: int, scale: float) -> Box:
    x = across(plan.gpu_memory_bytes, scale)
    return Box(left=x - 1, top=top - 6, right=x + 1, bottom=top + ROW * rows, colour=INK)


def under(plan: Plan, top: float, scale: float) -> list[Word]:
    x = min(across(plan.gpu_memory_bytes, scale), BAR_RIGHT)
    text = f"{plan.gpu} has {plan.gpu_memory_bytes / GIB:.1f} GiB"
    return [
        Word(x=MARGIN, y=top + 14, text="allocated on the fullest rank", size=13, colour=SOFT),
        Word(x=x, y=top + 14, text=text, size=13, colour=SOFT, anchor="right"),
    ]


def legend(top: float) -> tuple[list[Box], list[Word]]:
    keys, names = [], []
    for place, (colour, (_, name, _)) in enumerate(zip(COLOURS, GROUPS, strict=True)):
        x = MARGIN + 185 * place
        keys.append(Box(left=x, top=top, right=x + 12, bottom=top + 12, colour=colour))
        names.append(Word(x=x + 20, y=top + 11, text=name, size=14, colour=SOFT))
    return keys, names
