"""Which experts get an adapter: the arithmetic, the names, and a run that measures and keeps its choice."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from adapted import CPU, load
from peft import PeftModel
from rich.console import Console

from gatewright.data.batch import make_batch
from gatewright.model.routing import count_routing
from gatewright.model.subset import most_routed, named_experts, never_routed, never_routed_text
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError
from gatewright.train import loop
from gatewright.train.choose_experts import FILE, routing_counts
from gatewright.train.forward import hidden_states
from gatewright.train.setup import set_up


def test_the_most_routed_are_taken_and_ties_go_to_the_lower_number() -> None:
    counts = {3: [5, 9, 9, 0], 7: [1, 1, 1, 1]}
    assert most_routed(counts, 0.5) == {3: [1, 2], 7: [0, 1]}
    assert most_routed(counts, 0.26) == {3: [1, 2], 7: [0, 1]}  # 1.04 experts round up
    assert most_routed({0: list(range(100))}, 0.07) == {0: list(range(93, 100))}
    assert most_routed(counts, 1.0) == {3: [0, 1, 2, 3], 7: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([(0, [1])], r"layer 0 has no routed experts; those that have: 1–2"),
        ([(1, [8])], r"layer 1 has experts 0 to 7, not 8"),
        ([(1, [1]), (1, [2])], r"layer 1 is named twice"),
    ],
)
def test_names_that_do_not_exist_are_refused(tmp_path: Path, layers: list[tuple[int, list[int]]], says: str) -> None:
    model = load(tiny.save_model("qwen3_moe", tmp_path / "m"))
    entries = [spec.LayerExperts(layer=layer, experts=experts) for layer, experts in layers]
    with pytest.raises(ModelError, match=says):
        named_experts(model, entries)


def test_experts_without_a_token_are_listed() -> None:
    silent = never_routed([[1, 0, 0, 0, 3], [1, 1, 1, 1, 1], [0, 9, 0, 9, 9]], [1, 2, 5])
    assert silent == {1: [1, 2, 3], 5: [0, 2]}
    assert "5 experts never got a token" in never_routed_text(silent)
    assert never_routed_text(silent).endswith("layer 1: 1–3; layer 5: 0, 2")


def test_counts_are_those_of_the_documents_asked_for(tmp_path: Path) -> None:
    trainer = set_up(tiny.make_run(tmp_path, "qwen3_moe"), log=lambda event: None)
    numbers = [n for step in range(4) for batch in trainer.loader.step(step) for n in batch.documents][:7]
    with torch.no_grad(), count_routing() as routing:
        hidden_states(trainer.model.eval(), make_batch(trainer.loader.view, numbers))
    counts = routing_counts(trainer.model, trainer.loader, documents=7, device=CPU)
    assert counts == {layer: counts_E.tolist() for layer, counts_E in routing.by_layer.items()}


def test_a_run_measures_its_experts_trains_only_those_and_goes_on_with_the_same(tmp_path: Path) -> None:
    run = tiny.make_run(
        tmp_path,
        "qwen3_moe",
        method__adapter__experts={"most_routed": 0.25, "documents": 20},
        train__save_every_steps=2,
    )
    assert loop.train(run, console=Console(quiet=True)) == 0
    chosen = {int(layer): experts for layer, experts in json.loads((run.folder / FILE).read_text())["layers"].items()}
    assert sorted(chosen) == [1, 2] and all(len(experts) == 2 for experts in chosen.values())
    tensors = tiny.read_tensors(run.folder / "adapter")
    for layer, experts in chosen.items():
        b = tensors[f"base_model.model.model.layers.{layer}.mlp.experts.lora_B.weight"].unflatten(1, (4, 8))
        assert [e for e in range(8) if b[..., e].any()] == experts
    PeftModel.from_pretrained(tiny.load_plain(Path(run.model.path)), str(run.folder / "adapter"))
    texts = [event["text"] for event in tiny.events(run, "finding")]
    assert any("the 25% most-routed experts of each layer get an adapter; they took" in text for text in texts)
    # A kept choice is taken as it is, even one that would not be measured again.
    kept = json.loads((run.folder / FILE).read_text())
    kept["layers"] = {"1": [0, 1], "2": [6, 7]}
    (run.folder / FILE).write_text(json.dumps(kept))
    trainer = set_up(run, log=lambda event: None)
    assert trainer.model.model.layers[2].mlp.experts.gatewright_lora.numbers == (6, 7)
