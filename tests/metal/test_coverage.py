"""What a run says that trains is what trains: by role and layer, and what cannot be had is refused."""

import json
from pathlib import Path

import families
import pytest
import tiny
import torch
from adapted import load, logits
from rich.console import Console

from gatewright.model.adapters import add_adapters, train_weights
from gatewright.model.coverage import by_role, coverage
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError
from gatewright.spec.event import ModelLoaded
from gatewright.train import loop
from gatewright.train.console import model_lines
from gatewright.train.optim import build_optimizer, trainable


def rows_of(model: torch.nn.Module, optimizer: str = "adamw") -> dict[str, dict[str, int | str | bool]]:
    return {str(row["role"]): row for row in by_role(coverage(model, optimizer=optimizer))}


def adapt(folder: Path, **settings: object) -> tuple[torch.nn.Module, list[str]]:
    model = load(folder)
    notes = add_adapters(model, spec.Adapter(**{"rank": 2} | settings), seed=0)
    return model, notes


def test_the_table_adds_up_to_what_trains(tmp_path: Path) -> None:
    model, _ = adapt(tiny.save_model("qwen2_moe", tmp_path / "m"), targets=["attention", "experts", "shared_experts"])
    rows = coverage(model, optimizer="adamw")
    parameters = trainable(model)
    assert sum(row.trainable_parameters for row in rows) == sum(p.numel() for p in parameters.values())
    optimizer = torch.optim.AdamW(parameters.values())
    logits(model).sum().backward()
    optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert sum(row.optimizer_bytes for row in rows) == state
    assert sum(row.gradient_bytes for row in rows) == sum(p.grad.nbytes for p in parameters.values())
    experts = [row for row in rows if row.role == "experts"]
    assert [(row.layer, row.trains, row.weights, row.of_weights, row.rank, row.experts) for row in experts] == [
        (layer, "adapter", 2, 2, 2, 4) for layer in range(3)
    ]


def test_roles_that_train_in_full_stand_beside_adapters(tmp_path: Path) -> None:
    model, _ = adapt(tiny.save_model("qwen3_moe", tmp_path / "m"), targets=["experts"], full=["router", "norm"])
    rows = rows_of(model)
    assert {role: row["how"] for role, row in rows.items()} == {
        "embedding": "frozen",
        "attention": "frozen",
        "mlp": "frozen",
        "router": "full",
        "experts": "adapter",
        "norm": "full",
        "head": "frozen",
    }
    assert rows["router"]["trainable_parameters"] == rows["router"]["parameters"] == 2 * 8 * 32
    assert rows["router"]["rank"] == 0 and rows["experts"]["rank"] == 2
    assert (rows["experts"]["layers"], rows["norm"]["layers"]) == (2, 4)


def test_some_experts_cost_their_share_of_weights_gradients_and_optimizer(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    whole = rows_of(adapt(folder, targets=["experts"])[0])["experts"]
    model = load(folder)
    subset = spec.ExpertSubset(layers=[spec.LayerExperts(layer=1, experts=[3, 0])])
    add_adapters(model, spec.Adapter(rank=2, targets=["experts"], experts=subset), seed=0, chosen={1: [0, 3]})
    part = rows_of(model)["experts"]
    for field in ("trainable_parameters", "weight_bytes", "gradient_bytes"):
        assert part[field] * 8 == whole[field]  # two of eight experts in one of two layers
    assert (part["layers"], part["of_layers"], part["experts"]) == (1, 2, 2)


def test_eight_bit_moments_are_counted_as_such(tmp_path: Path) -> None:
    model, _ = adapt(tiny.save_model("llama", tmp_path / "m"), rank=96, targets=["mlp"])
    parameters = trainable(model)
    assert len({p.numel() >= 4096 for p in parameters.values()}) == 2  # some large enough for 8 bits, some not
    run = tiny.make_run(tmp_path, "llama", train__optimizer="adamw8bit")
    optimizer = build_optimizer(parameters, run.train)
    logits(model).sum().backward()
    optimizer.step()
    moments = ("state1", "state2", "absmax1", "absmax2")
    state = sum(s[key].nbytes for s in optimizer.state.values() for key in moments if key in s)
    assert sum(row.optimizer_bytes for row in coverage(model, optimizer="adamw8bit")) == state


@pytest.mark.parametrize(
    ("roles", "router", "trains"),
    [
        (None, False, {"embedding", "attention", "mlp", "experts", "norm", "head"}),
        (None, True, {"embedding", "attention", "mlp", "experts", "norm", "head", "router"}),
        (["experts"], False, {"experts"}),
        (["router", "norm"], False, {"router", "norm"}),
    ],
)
def test_full_fine_tuning_trains_what_is_named(
    tmp_path: Path, roles: list[str] | None, router: bool, trains: set[str]
) -> None:
    model = load(tiny.save_model("qwen3_moe", tmp_path / "m"))
    train_weights(model, roles, router=router)
    rows = rows_of(model)
    assert {role for role, row in rows.items() if row["trains"]} == trains
    for role in trains:
        assert rows[role]["trainable_parameters"] == rows[role]["parameters"]
    logits(model).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_role_never_takes_what_is_not_named(tmp_path: Path) -> None:
    """PEFT's `all-linear` puts LoRA on the gate (B10), and `gate_proj` on the fused experts."""
    for kind, targets in (("mixtral", ["attention", "experts"]), ("qwen3_moe", ["mlp"]), ("qwen2_moe", ["attention"])):
        model, _ = adapt(tiny.save_model(kind, tmp_path / kind), targets=targets)
        assert {role for role, row in rows_of(model).items() if row["trains"]} == set(targets)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("llama", {"targets": ["attention", "experts"]}, r"'experts' matches no weight of this model, which has atten"),
        ("mixtral", {"targets": ["mlp"]}, r"'mlp' matches no weight of this model, which has attention, experts, rou"),
        ("llama", {"targets": ["*.w_proj"]}, r"'\*\.w_proj' matches no module .* names look like model\.embed_tokens"),
        (
            "qwen3_moe",
            {"targets": ["*.gate_proj"]},
            r"leave out the experts of layer 1 .* fused as gate_up_proj and ",
        ),
        ("mixtral", {"targets": ["attention", "*.w1"]}, r"leave out the experts of layer 0"),
        ("llama-tied", {"targets": ["embedding"]}, r"embedding and head are one tied weight"),
        ("llama-tied", {"targets": ["head"]}, r"'head' matches no weight of this model \(its head is the embedding's"),
        ("llama-tied", {"targets": ["attention"], "full": ["embedding"]}, r"one tied weight"),
        ("llama-tied", {"targets": ["*embed_tokens"]}, r"one tied weight"),
        ("mixtral", {"targets": ["router"], "full": ["router"]}, r"router stands in targets and in full"),
        ("llama", {"targets": ["mlp"], "full": ["router"]}, r"full: 'router' matches no weight"),
        ("mixtral", {"targets": ["attention"], "experts": {"most_routed": 0.5}}, r"no target is an expert"),
    ],
)
def test_a_target_that_means_nothing_or_less_stops_the_run(
    tmp_path: Path, kind: str, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        adapt(tiny.save_model(kind, tmp_path / "m"), **settings)


def test_full_fine_tuning_of_an_absent_role_is_refused(tmp_path: Path) -> None:
    model = load(tiny.save_model("llama-tied", tmp_path / "m"))
    with pytest.raises(ModelError, match=r"method\.roles: 'router' matches no weight of this model, which has embed"):
        train_weights(model, ["attention", "router"], router=False)
    with pytest.raises(ModelError, match=r"'head' .*its head is the embedding's weight"):
        train_weights(model, ["head"], router=False)


def test_what_a_target_leaves_out_is_said(tmp_path: Path) -> None:
    _, notes = adapt(tiny.save_model("mixtral", tmp_path / "a"), targets=["attention"])
    assert any("no expert gets an adapter; experts are" in note for note in notes)
    _, notes = adapt(families.save_family("qwen3_5_moe", tmp_path / "b"), targets=["*.q_proj", "experts"])
    assert any("'*.q_proj' reaches 1 of the 2 layers with attention" in note for note in notes)


def test_the_table_is_shown_and_kept(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", train__steps=1, method__adapter__full=["router"])
    assert loop.train(run, console=Console(quiet=True)) == 0
    rows = json.loads((run.folder / "coverage.json").read_text())
    experts = [row for row in rows if row["role"] == "experts"]
    assert [row["layer"] for row in experts] == [1, 2] and all(row["trains"] == "adapter" for row in experts)
    [event] = tiny.events(run, "model")
    event.pop("kind"), event.pop("v"), event.pop("time")
    shown = "\n".join(model_lines(ModelLoaded(**event)))
    assert "rank 4 on 4 weights in 2 of 2 layers, 16 experts" in shown
    assert "in full: 2 weights in 2 of 2 layers" in shown
