"""A step's schedule as a picture: ranks from top to bottom, time from left to right, what each rank does by colour."""

from collections.abc import Iterator

from gatewright.report.plan_picture import EMPTY, INK, MARGIN, SOFT, WIDTH, Box, Picture, Word
from gatewright.report.schedule_text import headline, seconds
from gatewright.spec.schedule import RankTime, ScheduleReport, SlotTime

KINDS = (("everything but attention", "#5b9bd5"), ("attention", "#1d5fa6"), ("exchange of keys and values", "#b4450b"))
LEFT, RIGHT = 90, WIDTH - MARGIN
TOP = 120
PLOT = 560
"""Height of all ranks together, where rows are not at their narrowest or widest."""


def picture(report: ScheduleReport) -> Picture:
    """The first simulated step; empty places are waiting."""
    step = report.steps[0]
    row = min(26.0, max(3.0, PLOT / report.ranks))
    bottom = TOP + row * report.ranks
    scale = (RIGHT - LEFT) / sum(slot.duration_s for slot in step.slots)
    boxes: list[Box] = []
    words = heading(report)
    start = 0.0
    for number, slot in enumerate(step.slots, start=1):
        left, right = LEFT + start * scale, LEFT + (start + slot.duration_s) * scale
        boxes.append(Box(left=left, top=TOP, right=right - 1, bottom=bottom, colour=EMPTY))
        for rank, times in enumerate(slot.ranks):
            boxes += bar(times, left=left, top=TOP + rank * row, row=row, scale=scale)
        if right - left > 24:
            words.append(Word(x=left, y=TOP - 6, text=slot_label(number, slot, right - left), size=12, colour=SOFT))
        start += slot.duration_s
    words += rank_labels(report, row)
    words += [
        Word(x=LEFT, y=bottom + 20, text="0 s", size=13, colour=SOFT),
        Word(x=RIGHT, y=bottom + 20, text=seconds(step.step_s), size=13, colour=SOFT, anchor="right"),
    ]
    keys, names = legend(bottom + 48)
    return Picture(width=WIDTH, height=round(bottom + 72), boxes=(*boxes, *keys), words=(*words, *names))


def heading(report: ScheduleReport) -> list[Word]:
    step = report.steps[0]
    machine = f"{report.ranks} × {report.gpu}, {report.capacity_tokens:,} tokens a rank, {report.model}"
    shown = f"the first of {len(report.steps)} simulated steps: {step.documents:,} documents, {step.tokens:,} tokens"
    return [
        Word(x=MARGIN, y=MARGIN + 14, text=headline(report), size=19),
        Word(x=MARGIN, y=MARGIN + 40, text=f"{machine}; {shown}", size=13, colour=SOFT),
    ]


def bar(times: RankTime, *, left: float, top: float, row: float, scale: float) -> Iterator[Box]:
    gap = 1 if row >= 5 else 0
    for seconds_of, (_, colour) in zip((times.tokens_s, times.attention_s, times.exchange_s), KINDS, strict=True):
        right = left + seconds_of * scale
        yield Box(left=left, top=top, right=right, bottom=top + row - gap, colour=colour)
        left = right


def slot_label(number: int, slot: SlotTime, width: float) -> str:
    return f"{number}: up to CP {slot.widest}" if width > 110 else str(number)


def rank_labels(report: ScheduleReport, row: float) -> Iterator[Word]:
    """Every rank where there is room, else the first of each node."""
    step = 1 if row >= 13 else max(report.ranks_per_node, round(13 / row))
    for rank in range(0, report.ranks, step):
        text = f"rank {rank}" if rank == 0 else str(rank)
        yield Word(x=LEFT - 8, y=TOP + rank * row + min(row, 13) - 1, text=text, size=11, colour=SOFT, anchor="right")


def legend(y: float) -> tuple[list[Box], list[Word]]:
    boxes, words = [], []
    x = float(LEFT)
    for name, colour in (*KINDS, ("waiting for the slowest rank", EMPTY)):
        boxes.append(Box(left=x, top=y - 11, right=x + 14, bottom=y + 1, colour=colour))
        words.append(Word(x=x + 20, y=y, text=name, size=13, colour=INK))
        x += 40 + 7.2 * len(name)
    return boxes, words
