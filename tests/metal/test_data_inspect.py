"""The page of `gatewright data inspect`, and the tokenizer it reads."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers_made import make_tokenizer
from typer.testing import CliRunner

from gatewright.cli import app
from gatewright.data.inspect import inspect_data
from gatewright.data.tokenizer import load_tokenizer
from gatewright.planner.catalogue import find_model
from gatewright.spec.errors import DataError, ModelError

CHATML = (Path(__file__).parent / "chat_templates" / "chatml.jinja").read_text()


@pytest.fixture
def place(tmp_path):
    make_tokenizer(template=CHATML, folder=tmp_path / "model")
    with (tmp_path / "chat.jsonl").open("w") as file:
        for n in range(200):
            answer = "one two three " * (1 + n * n // 400)
            messages = [
                {"role": "user", "content": f"Count [bold]{n}[/bold]."},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return tmp_path


def page(place, *, colour=False, **options):
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=colour, color_system="standard" if colour else None)
    options = {"max_tokens": None, "capacity": None} | options
    inspect_data(place / "chat.jsonl", model=str(place / "model"), console=console, root=place / "tokens", **options)
    return out.getvalue()


def test_page(place):
    text = page(place, max_tokens=256, capacity=2048)
    assert max(map(len, text.splitlines()[2:])) <= 100, "all but the paths in the first lines fit"
    for needed in (
        r"documents +200\n",
        r"trained tokens +[\d,]+ +\d+\.\d%\n",
        r"p50 [\d,]+ +p90 [\d,]+ +p99 [\d,]+ +max [\d,]+\n",
        r"documents a batch +1 +2 +4 +8 +16 +32\n  padding +0\.0% +\d+\.\d%",
        r"Packing into micro-batches of 2,048 tokens\n  \d+ packs, 9\d\.\d\d% full",
        r"at least \d+ are needed for the sum of tokens, \d+ for what fits together",
        r"\n  256 +[1-9]\d* +[\d,]+ \(\d+\.\d%\) +\d+ +[\d,]+ \(\d+\.\d%\)\n",
        r"p99 = [\d,]+ +2 ",
        r"packing instead +1\.00× +1\.\d\d× +1\.\d\d×",
        r"speed-ups count tokens only",
        r"\n  256 +[2-9]\.\d\d× +1\.\d\d× +1\.\d\d× +[\d,]+ \(\d+\.\d%\)\n",
        r"half the longest = [\d,]+ +2\.0\d× +1\.\d\d× +1\.\d\d×",
    ):
        assert re.search(needed, text), needed
    assert "Count [bold]0[/bold].<|im_end|>\n<|im_start|>assistant\n⟦one two three <|im_end|>⟧" in text


def test_attention_makes_speed_ups_larger(place):
    text = page(place, knee_tokens=100)
    assert "attention costs as much as all the rest at documents of 100 tokens" in text
    with_attention, without = (
        float(re.search(r"packing instead.* (\d+\.\d\d)×\n", page(place, knee_tokens=knee))[1]) for knee in (100, None)
    )
    assert with_attention > without > 1.5


def test_colour_takes_the_place_of_marks(place):
    text = page(place, colour=True)
    assert "⟦" not in text and "\x1b[32mone two three" in text


def test_a_capacity_below_the_longest_document(place):
    assert re.search(r"impossible: the longest document has \d+ tokens", page(place, capacity=50))


def test_the_beginning_of_a_long_document_is_shown(place):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one two three " * 1000}]
    (place / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert re.search(r"… and [\d,]+ tokens more\n$", page(place))


def test_wrong_requests(place):
    with pytest.raises(DataError, match=r"max_tokens is 'p9x'"):
        page(place, max_tokens="p9x")
    (place / "chat.jsonl").unlink()
    with pytest.raises(DataError, match=r"chat.jsonl: no such file"):
        page(place)


def test_tokenizers_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelError, match="never fetched from a hub"):
        load_tokenizer(Path("Qwen/Qwen3-30B-A3B"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no tokenizer\.json in it, so no fast tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_survives_the_folder(tmp_path):
    make_tokenizer(template=CHATML, folder=tmp_path)
    assert load_tokenizer(tmp_path).chat_template == CHATML


def test_schedule_of_documents_counts_them_with_the_models_tokenizer(place, monkeypatch):
    config = find_model("Qwen2.5-0.5B").config
    (place / "model" / "config.json").write_text(json.dumps(dict(config)))
    monkeypatch.chdir(place)
    options = ["--model", "model", "--world", "6", "--gpu", "cpu", "--tokens-per-rank", "1024", "--json"]
    found = json.loads(CliRunner().invoke(app, ["data", "schedule", "chat.jsonl", *options]).stdout)
    assert found["documents"] == 200 and found["ranks"] == 6 and not found["model_is_default"]
    (store,) = (place / "runs" / ".tokens").iterdir()
    again = json.loads(CliRunner().invoke(app, ["data", "schedule", str(store), *options]).stdout)
    assert (again["tokens"], again["step_s"]) == (found["tokens"], found["step_s"])
