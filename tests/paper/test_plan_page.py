"""The plan as a page and as a picture: whole, escaped, and true to the figures."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from gatewright.planner.ask import ask
from gatewright.planner.plan import compare, plan
from gatewright.report.plan_page import render_page
from gatewright.report.plan_picture import BAR_LEFT, BAR_RIGHT, WIDTH, picture
from gatewright.report.plan_text import gib

VOID = {"meta", "rect", "path", "br"}


class Balanced(HTMLParser):
    """Every element that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> str:
    reader = Balanced()
    reader.feed(page)
    assert reader.open == []
    return page


def test_the_page_holds_every_phase_part_and_layout() -> None:
    answer = plan("Qwen3-30B-A3B", gpu="h200", gpus=4, rank=32, targets=("attention", "experts"), hours=10)
    page = parsed(render_page([answer]))
    assert answer.chosen is not None and answer.chosen.memory is not None
    for phase in answer.chosen.memory.phases:
        assert f"{gib(phase.bytes)} GiB" in page and all(part.name in page for part in phase.parts)
    assert all(item.layout in page for item in (answer.chosen, *answer.alternatives, *answer.rejected))
    assert "nan" not in re.sub(r"<[^>]*>", " ", page).lower().split() and 'width="-' not in page


def test_a_comparison_and_a_failure_are_pages_too() -> None:
    question = ask("Qwen3-30B-A3B", gpu="h200", hours=10)
    page = parsed(render_page(compare(question, gpus=1, methods=("lora", "full"))))
    assert "too large" in page and page.count("Time and cost") == 1
    assert "does not fit" in parsed(render_page([plan("DeepSeek-V4-Pro", gpu="h200", gpus=4)]))


def test_names_are_escaped() -> None:
    answer = replace(plan("Qwen3-8B", gpu="h200"), model="<script>alert(1)</script>", notes=("a & b <i>",))
    page = parsed(render_page([answer]))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "a &amp; b &lt;i&gt;" in page


def test_bars_of_a_picture_add_up_to_their_phase() -> None:
    answer = plan("Qwen3-30B-A3B", gpu="h200", gpus=4, rank=32, targets=("attention", "experts"))
    drawn = picture([answer])
    assert answer.chosen is not None and answer.chosen.memory is not None
    scale = answer.gpu_memory_bytes * 1.02
    for row, phase in enumerate(answer.chosen.memory.phases):
        bars = [box for box in drawn.boxes if box.bottom - box.top == 22][row * 6 + 1 : row * 6 + 6]
        wide = sum(box.right - box.left for box in bars) / (BAR_RIGHT - BAR_LEFT) * scale
        assert abs(wide - phase.bytes) < 1e6
    assert all(0 <= box.left <= box.right <= WIDTH and box.bottom <= drawn.height for box in drawn.boxes)
    assert any(word.text.startswith("fits: 4 × h200") for word in drawn.words)
