"""The router in whole runs: it trains when asked, its state resumes to the bit, its guard acts, its capacity drops."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from test_router_loss import deepseek
from transformers import AutoModelForCausalLM

from gatewright.model.capacity import Capacity, kept
from gatewright.spec.errors import RouterCollapsed, RunFileError
from gatewright.spec.event import Event, Finding
from gatewright.spec.run import Run
from gatewright.train.loop import train
from gatewright.train.setup import set_up

ROOT = Path(__file__).parents[2]


def run_quietly(run: Run) -> int:
    return train(run, console=Console(quiet=True))


@pytest.mark.parametrize("method", [{}, {"method__adapter": None}], ids=["lora", "full"])
def test_the_router_trains_when_asked_and_at_its_own_rate(tmp_path: Path, method: dict[str, object]) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", router__train=True, router__lr_scale=0.5, **method)
    trainer = set_up(run, log=lambda event: None)
    assert trainer.router and trainer.router.lr_scale == 0.5
    assert run_quietly(run) == 0
    for step in tiny.events(run, "step"):
        assert step["router_lr"] == pytest.approx(0.5 * step["lr"])
    looks = tiny.events(run, "router_health")
    assert looks[0]["step"] == 0 and all(d == 0 for d in looks[0]["drift"])


def test_training_with_every_router_loss_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = {
        "router__train": True, "router__balance": 0.05, "router__z": 1e-3, "router__guard": {"every_steps": 2},
        "train__steps": 6, "train__save_every_steps": 3,
    }  # fmt: skip
    straight = tiny.make_run(tmp_path, "qwen3_moe", run="straight", **settings)
    assert run_quietly(straight) == 0

    broken = tiny.make_run(tmp_path, "qwen3_moe", run="broken", **settings)
    assert run_quietly(broken) == 0
    # As after a kill between the checkpoints of step 3 and step 6.
    for lost in (broken.folder / "checkpoints" / "step-00000006", broken.folder / "adapter"):
        for file in sorted(lost.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        lost.rmdir()
    assert run_quietly(broken) == 0
    assert tiny.events(broken, "start")[-1]["resumed_step"] == 3
    want, got = tiny.read_tensors(straight.folder / "adapter"), tiny.read_tensors(broken.folder / "adapter")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    last = [tiny.events(run, "step")[-1] for run in (straight, broken)]
    assert last[0]["balance_loss"] == last[1]["balance_loss"] and last[0]["z_loss"] == last[1]["z_loss"]


def save_deepseek(folder: Path) -> None:
    model = deepseek()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
                parameter[:3] += 0.4  # experts that nearly all tokens like
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)


def test_the_bias_moves_the_load_and_is_saved(tmp_path: Path) -> None:
    base = tmp_path / "deepseek"
    save_deepseek(base)
    config = json.loads((base / "config.json").read_text()) | {"vocab_size": 272}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(config["vocab_size"], mean_resizing=False)
    model.save_pretrained(base)
    run = tiny.make_run(
        tmp_path, "llama", model__path=str(base), method__adapter=None, router__bias_rate=0.02, train__steps=30,
        train__lr=1e-6,
    )  # fmt: skip
    assert run_quietly(run) == 0
    loads = [torch.tensor(step["expert_tokens"][0]).double() for step in tiny.events(run, "step")]
    first, last = sum(loads[:5]), sum(loads[-5:])
    assert last.std() / last.mean() < 0.6 * first.std() / first.mean()
    saved = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    bias = saved.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.abs().max() > 0.1 and bias.mean().abs() < 1e-5


@pytest.mark.parametrize("settings", [{"router__bias_rate": 1e-3}, {"router__guard": {"action": ["bias"]}}])
def test_a_router_without_a_bias_refuses_its_update(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(RunFileError, match="no e_score_correction_bias"):
        set_up(tiny.make_run(tmp_path, "mixtral", **settings), log=lambda event: None)


@pytest.mark.parametrize(("balance", "said"), [(0.0, True), (0.1, False)])
def test_a_router_that_trains_unbalanced_is_said(tmp_path: Path, balance: float, said: bool) -> None:
    events: list[Event] = []
    set_up(tiny.make_run(tmp_path, "qwen3_moe", router__train=True, router__balance=balance), log=events.append)
    assert any(isinstance(e, Finding) and "nothing that balances it" in e.text for e in events) == said


def test_a_probe_too_small_to_see_death_is_said(tmp_path: Path) -> None:
    said: list[Event] = []
    set_up(tiny.make_run(tmp_path, "qwen3_moe", router__guard={"action": ["stop"], "every_steps": 1}), log=said.append)
    assert any(isinstance(e, Finding) and "never see red" in e.text for e in said)


@pytest.mark.parametrize("key", ["train", "balance", "z", "capacity"])
def test_a_dense_model_refuses_router_settings(tmp_path: Path, key: str) -> None:
    value: object = True if key == "train" else 1.5
    with pytest.raises(RunFileError, match=f"router.{key}: LlamaForCausalLM is a dense model"):
        set_up(tiny.make_run(tmp_path, "llama", **{f"router__{key}": value}), log=lambda event: None)


def test_which_assignments_are_kept() -> None:
    expert_S = torch.tensor([0, 0, 0, 1, 0, 2])
    weight_S = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.7, 0.3])
    one = Capacity(factor=1.0, experts_per_pool=1, drop="probs")  # ceil(6 / 3) = 2 an expert
    assert kept(expert_S, weight_S, experts=3, capacity=one).tolist() == [False, True, False, True, True, True]
    first = Capacity(factor=1.0, experts_per_pool=1, drop="position")
    assert kept(expert_S, weight_S, experts=3, capacity=first).tolist() == [True, True, False, True, False, True]
    rank = Capacity(factor=1.0, experts_per_pool=2, drop="position")  # experts 0 and 1 have room for 3 together
    assert kept(torch.tensor([0, 1, 0, 3]), torch.ones(4), experts=4, capacity=rank).tolist() == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("method", [{}, {"method__adapter": None}], ids=["lora", "full"])
def test_what_is_dropped_is_counted_layer_by_layer(tmp_path: Path, method: dict[str, object]) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", router__capacity=1.0, train__checkpointing="full", **method)
    assert run_quietly(run) == 0
    for step in tiny.events(run, "step"):
        per_layer = step["dropped_by_layer"]
        assert len(per_layer) == 2 and step["dropped_tokens"] == sum(per_layer) > 0
        assert [sum(row) for row in step["expert_tokens"]] == [2 * step["tokens"]] * 2, "chosen, dropped or not"
    assert any("router.capacity 1 per expert" in e["text"] for e in tiny.events(run, "finding"))


def test_a_capacity_for_all_changes_nothing(tmp_path: Path) -> None:
    for name, capacity in (("free", "dropless"), ("roomy", 8.0)):
        assert run_quietly(tiny.make_run(tmp_path, "qwen3_moe", run=name, router__capacity=capacity)) == 0
    runs = [tiny.make_run(tmp_path, "qwen3_moe", run=name) for name in ("free", "roomy")]
    assert [s["loss"] for s in tiny.events(runs[0], "step")] == [s["loss"] for s in tiny.events(runs[1], "step")]


GUARDED = {
    "router__train": True, "router__lr_scale": 100.0, "train__steps": 12, "train__save_every_steps": 4,
}  # fmt: skip


def guarded(tmp_path: Path, actions: list[str], **changes: object) -> Run:
    guard = {"action": actions, "every_steps": 2, "yellow_kl": 1e-4, "orange_starved": 0.0, "orange_cv": 1.0001}
    return tiny.make_run(tmp_path, "qwen3_moe", router__guard=guard | changes, **GUARDED)


def test_actions_are_taken_in_order_and_are_events(tmp_path: Path) -> None:
    run = guarded(tmp_path, ["lower_lr", "balance", "freeze"])
    assert run_quietly(run) == 0
    acts = [event for event in tiny.events(run, "guard") if event["action"] != "none"]
    assert [event["action"] for event in acts] == ["lower_lr", "balance", "freeze"]
    assert all(event["reasons"] for event in acts)
    steps = tiny.events(run, "step")
    lowered, frozen = acts[0]["step"], acts[2]["step"]
    assert steps[lowered]["router_lr"] == pytest.approx(10.0 * steps[lowered]["lr"])
    assert all(step["router_lr"] is None for step in steps if step["step"] > frozen)
    assert steps[acts[1]["step"]]["balance_loss"] is not None and steps[0]["balance_loss"] is None
    looks = {look["step"]: look["drift"] for look in tiny.events(run, "router_health")}
    assert looks[12] == looks[frozen], "a frozen router stands still"


# --- a real collapse: the benchmark's own measurement, shorter ---------------------------------------------------

HOT = {"train": True, "lr_scale": 10.0}
STEPS = 60


@pytest.fixture(scope="module")
def collapse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, object]], dict[str, Any]]:
    """Fine-tunes a mixture of experts made by benchmarks/router_guard.py with other router settings."""
    spec = importlib.util.spec_from_file_location("router_guard", ROOT / "benchmarks" / "router_guard.py")
    assert spec and spec.loader
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    folder = tmp_path_factory.mktemp("collapse")
    base = benchmark.make_base(folder, steps=250)
    benchmark.write_headers(folder)
    return lambda name, router: benchmark.fine_tune(folder, base, name, router, steps=STEPS, lr=1e-3)


def test_a_hot_router_collapses_without_the_guard_and_lives_with_it(collapse: Callable[..., dict[str, Any]]) -> None:
    without = collapse("without", HOT)
    guarded = collapse("guarded", HOT | {"guard": {"action": ["lower_lr", "rollback"], "lower_lr_to": 0.01}})
    assert without["dead"][0] == guarded["dead"][0] == 0
    assert without["dead"][-1] >= 2
    assert guarded["dead"][-1] == 0
    assert [acted["action"] for acted in guarded["actions"]] == ["lower_lr", "rollback"]
    assert guarded["loss"][STEPS] <= without["loss"][STEPS] + 0.02
    assert guarded["data_steps"] == [*range(40), *range(40, 40 + STEPS)], "skipped, not taken again"


def test_experts_without_a_token_are_listed_at_the_end(tmp_path: Path) -> None:
    """Counts of the whole run."""
    base = tmp_path / "base-qwen3_moe"
    run = tiny.make_run(tmp_path, "qwen3_moe", train__save_every_steps=2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        gate = model.model.layers[1].mlp.gate.weight
        gate[:] = 0.0  # ties: the same two experts are chosen, always
    model.save_pretrained(base)
    assert run_quietly(run) == 0
    [said] = [e["text"] for e in tiny.events(run, "finding") if "never got a token" in e["text"]]
    counts = [torch.tensor(step["expert_tokens"]) for step in tiny.events(run, "step")]
    silent = (torch.stack(counts).sum(dim=0) == 0).sum(dim=1)
    assert silent[0] == 6 and said.startswith(f"{silent.sum()} experts") and "layer 1: " in said


def test_a_rollback_may_take_the_data_again(collapse: Callable[..., dict[str, Any]]) -> None:
    again = {"action": ["lower_lr", "rollback"], "lower_lr_to": 0.01, "after_rollback": "repeat"}
    assert collapse("again", HOT | {"guard": again})["data_steps"] == [*range(40), *range(STEPS)]


def test_a_router_that_is_reset_is_that_of_step_0(collapse: Callable[..., dict[str, Any]]) -> None:
    found = collapse("reset", HOT | {"guard": {"action": ["reset"]}})
    [acted] = [acted for acted in found["actions"] if acted["action"] == "reset"]
    at = found["steps"].index(acted["step"])
    assert found["drift"][at + 1] < found["drift"][at]


def test_stop_ends_the_run_with_its_reasons(collapse: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RouterCollapsed, match=r"step 20: the router is ill and router\.guard says stop: \d+ experts"):
        collapse("stop", HOT | {"guard": {"action": ["stop"]}})
