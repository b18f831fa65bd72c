"""The page stands alone, is well formed, says the numbers of the run, and no text of a run can act in it."""

import base64
import hashlib
import json
import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic_run as synthetic

from gatewright.report.html import render_html
from gatewright.report.read import read_run_folder

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\u2028"


class Page(HTMLParser):
    """The page's elements; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def page_of(folder: Path, events: list[dict[str, Any]], **files: Any) -> str:
    synthetic.write_run(folder, events, **files)
    return render_html(read_run_folder(folder, now=synthetic.BEGIN + timedelta(hours=6)))


RUNS = {
    "nothing": [],
    "one finding": synthetic.whole_run()[:1],
    "no step yet": synthetic.whole_run()[:6],
    "one step": synthetic.whole_run()[:7],
    "two steps": synthetic.whole_run()[:8],
    "small": synthetic.whole_run(),
    "dense": synthetic.whole_run(experts=0),
    "many experts": synthetic.whole_run(total=650, layers=8, experts=65),
    "failed": synthetic.failed_run(),
}


@pytest.mark.parametrize("events", RUNS.values(), ids=RUNS)
def test_every_run_gives_a_well_formed_page_that_fetches_nothing(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    page = Page(page_of(tmp_path, events))
    assert [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "base", "form")] == []
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "href", "xlink:href") or (value or "").startswith("#"), value
    assert "url(" not in "".join(page.inside("style"))
    assert "@import" not in "".join(page.inside("style"))


@pytest.mark.parametrize("events", RUNS.values(), ids=RUNS)
def test_every_drawing_has_words(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    page = Page(page_of(tmp_path, events))
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for drawing in page.all("svg"):
        named = (drawing.get("aria-labelledby") or "").split()
        assert drawing.get("aria-hidden") == "true" or (len(named) == 2 and set(named) <= set(identifiers))
    targets = [(link["href"] or "")[1:] for link in page.all("a")]
    assert set(targets) <= set(identifiers)


@pytest.mark.parametrize("events", RUNS.values(), ids=RUNS)
def test_no_coordinate_is_lost(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    page = Page(page_of(tmp_path, events))
    for path in page.all("path"):
        assert re.fullmatch(r"[MLhvlmz0-9. ,-]+", path["d"] or ""), path
    assert not re.search(r"(?i)\bnan|\binf", " ".join(str(a.get("style")) for _, a in page.elements))


def test_the_only_script_is_the_pages_own(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, synthetic.whole_run()))
    blocks = [text for text in page.inside("script") if not text.startswith("{")]
    assert len(blocks) == 1
    digest = base64.b64encode(hashlib.sha256(blocks[0].encode()).digest()).decode()
    policies = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert len(policies) == 1
    assert f"script-src 'sha256-{digest}'" in (policies[0] or "")
    assert "default-src 'none'" in (policies[0] or "")


def test_the_data_for_the_script_is_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    page = Page(page_of(tmp_path, synthetic.failed_run()))
    blocks = [text for text in page.inside("script") if text.startswith("{")]
    data = [json.loads(block, parse_constant=refuse) for block in blocks]
    loss = next(line for block in data for line in block.get("lines", []) if line["label"] == "training")
    assert loss["y"][-1] is None
    assert len(loss["y"]) == 103


def test_no_text_of_a_run_can_act(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=8)
    for event in events:
        match event["kind"]:
            case "start":
                event.update(run=EVIL, device=EVIL, versions={EVIL: EVIL})
            case "model":
                event.update(path=EVIL, architecture=EVIL, dtype=EVIL, attention=EVIL, experts_kernel=EVIL)
                event["coverage"][0] = {**event["coverage"][0], "role": EVIL}
            case "data":
                event.update(source=EVIL, overlong=EVIL, split=EVIL + event["split"])
            case "evaluate" if event["asked"]:
                event["samples"] = [{"prompt": EVIL, "expected": EVIL, "answer": EVIL}]
            case "save":
                event.update(path=EVIL)
            case "finding":
                event.update(severity=EVIL, text=EVIL)
            case "stop":
                event.update(reason=EVIL, detail=EVIL)
    events.append({"v": 1, "time": "", "kind": EVIL})
    text = page_of(tmp_path, events, run_file=EVIL)
    page = Page(text)
    assert page.all("img") == []
    assert len([block for block in page.inside("script") if not block.startswith("{")]) == 1
    assert "alert(1)" not in "".join(page.inside("script"))
    assert "<script>alert" not in text
    assert sum("alert(1)" in words for _, words in page.texts) > 15, "the texts are shown"


def test_the_page_says_the_numbers(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, synthetic.whole_run()))
    values = page.inside("dd")
    for value in ("2.37 → 0.836", "3/64 → 41/64", "120 of 120", "2,973", "2.05 GiB", "97.7 %", "1.64 ×"):
        assert value in values, value
    cells = page.inside("td")
    assert "1 dead (3)" in cells
    assert "1 starved (1)" in cells
    assert page.inside("span").count("finished") == 1


def test_every_expert_of_every_layer_is_drawn_and_listed(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, synthetic.whole_run(total=40, layers=6, experts=16)))
    maps = [drawing for drawing in page.all("svg") if drawing.get("class") == "heat"]
    assert [drawing["viewbox"] for drawing in maps] == ["0 0 16 1"] * 18 + ["0 0 40 16"]
    areas = [
        sum(int(width) for width in re.findall(r"h(\d+)v1", path["d"] or ""))
        for path in page.all("path")
        if re.fullmatch(r"q(-?\d+|dead)", path.get("class") or "")
    ]
    legend = 25 + 2
    assert sum(areas) == 18 * 16 + 40 * 16 + legend


def test_a_restart_and_lost_steps_are_marked(tmp_path: Path) -> None:
    text = page_of(tmp_path, synthetic.failed_run())
    assert '<span class="mark" style="left:58.25%">restart</span>' in text
    assert '<span class="lost" style="left:100.00%">×</span>' in text
    assert "not finite: 1 step" in text


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    events = synthetic.whole_run(total=2000, layers=2, experts=4)
    assert len(page_of(tmp_path, events)) < 500_000
