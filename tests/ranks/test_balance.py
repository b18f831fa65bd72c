"""What ranks get in a step: packs of like cost where the run asks for it, and the exchange asked for, or why not."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from processes import free_ports, on_ranks
from rich.console import Console
from whole_runs import finish

from gatewright.packing.exchange_cost import Heads
from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.errors import RunFileError
from gatewright.spec.event import Event, Finding
from gatewright.spec.run import Run
from gatewright.train.context import refuse_heads
from gatewright.train.loop import train
from gatewright.train.setup import set_up

STEPS = 12


def uneven(folder: Path, **changes: object) -> Run:
    """A run on texts of 8 to 400 tokens, four packs a step."""
    run = tiny.make_run(
        folder, "llama", train__steps=STEPS, train__tokens_per_step=1600, train__micro_batch_tokens=400, **changes
    )
    draw = random.Random(3)
    rows = [{"text": "ab " * int(min(130, max(2, draw.lognormvariate(2.5, 1.2))))} for _ in range(400)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def squares(place: Place, runs: list[Run], ports: list[int]) -> list[tuple[list[int], list[str]]]:
    """Of each run: the sum of the squares of the lengths in each micro-batch of this rank, and the notes."""
    found = []
    for run, port in zip(runs, ports, strict=True):
        said: list[Event] = []
        layout = layout_of(run.parallel, ranks=place.size)
        with join_ranks(replace(place, port=port), layout, device=torch.device("cpu"), timeout_s=60) as ranks:
            loader = set_up(run, log=said.append, ranks=ranks).loader
            batches = [batch for step in range(STEPS) for batch in loader.step(step)]
        notes = [event.text for event in said if isinstance(event, Finding)]
        found.append(([sum(n * n for n in batch.lengths) for batch in batches], notes))
    return found


def test_two_ranks_wait_less_for_each_other_with_packs_that_cost_alike(tmp_path: Path) -> None:
    runs = [uneven(tmp_path, run="drawn"), uneven(tmp_path, run="alike", data__alike=True)]
    first, second = on_ranks(2, tmp_path / "ranks", squares, runs, free_ports(2))

    def spread(number: int) -> float:
        pairs = list(zip(first[number][0], second[number][0], strict=True))
        return sum(map(max, pairs)) / (sum(map(sum, pairs)) / 2) - 1

    assert spread(1) < spread(0) / 2, (spread(0), spread(1))
    assert sorted(first[0][0] + second[0][0]) != sorted(first[1][0] + second[1][0]), "steps hold other packs"


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama", train__steps=2, train__save_every_steps=1)
    assert train(run, console=Console(quiet=True)) == 0
    changed = run.model_copy(update={"data": run.data.model_copy(update={"alike": True})})
    with pytest.raises(RunFileError, match=r"data\.alike: False then, True now"):
        train(changed, console=Console(quiet=True))


def test_heads_that_can_never_be_dealt_are_refused() -> None:
    heads = Heads(query_heads=4, key_heads=2, qk_dim=16, v_dim=16)
    with pytest.raises(RunFileError, match=r"4 query heads cannot be dealt evenly to groups of 3 ranks; set auto"):
        refuse_heads(heads, ranks=3, size=None)
    with pytest.raises(RunFileError, match="different numbers of query heads"):
        refuse_heads(replace(heads, query_heads=None), ranks=2, size=None)
    with pytest.raises(RunFileError, match="groups of 8 ranks"):
        refuse_heads(heads, ranks=16, size=8)
    refuse_heads(heads, ranks=6, size=None)  # pairs can
    refuse_heads(heads, ranks=1, size=None)


def test_an_exchange_that_a_micro_batch_cannot_make_is_said_once_and_counted(tmp_path: Path) -> None:
    base = tiny.save_model("llama", tmp_path / "base-llama", vocab_size=272, num_attention_heads=2)
    tiny.save_tokenizer(base)
    tiny.save_rows(tmp_path / "train.jsonl", 60)
    run = tiny.make_run(
        tmp_path, "llama", parallel__cp="dynamic", parallel__exchange="heads", train__micro_batch_tokens=30,
        train__steps=3,
    )  # fmt: skip
    finish(run, 4)
    made = [step["exchanges"] for step in tiny.events(run, "step")]
    # Two heads can be dealt to pairs, but not to all four ranks.
    assert all(set(step) <= {"heads over 2", "moved over 4", "whole"} for step in made)
    assert sum(step.get("moved over 4", 0) for step in made) > 0, made
    told = [event["text"] for event in tiny.events(run, "finding") if "parallel.exchange" in event["text"]]
    assert len(told) == 1 and "do not divide the 2 query heads" in told[0]
