"""Adapter folders that are not what the run needs are refused by name; digests and proofs tell two adapters apart."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from adapted import adapted, load
from rich.console import Console
from safetensors.torch import load_file, save_file

from gatewright.model.adapter_files import WEIGHTS, adapter_digest, adapter_entries, load_adapter, save_adapter
from gatewright.model.adapters import add_adapters
from gatewright.model.base_files import base_fingerprint, refuse_nan
from gatewright.model.expert_lora import ExpertLora
from gatewright.model.head import head_of
from gatewright.spec import run as spec
from gatewright.spec.errors import CheckpointError, ModelError
from gatewright.spec.run import Run
from gatewright.train import loop
from gatewright.train.prove_adapter import prove_reload
from gatewright.train.setup import set_up

ADAPTER = spec.Adapter(rank=4, targets=["attention", "experts"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base model and a sound adapter of it."""
    root = tmp_path_factory.mktemp("made")
    base = tiny.save_model("qwen3_moe", root / "m")
    save_adapter(adapted(base, ADAPTER), ADAPTER, root / "a", base=str(base))
    return base, root / "a"


def change_weights(folder: Path, key_end: str, change: object) -> None:
    tensors = load_file(folder / WEIGHTS)
    key = next(key for key in tensors if key.endswith(key_end))
    tensors[key] = change(tensors[key])
    save_file(tensors, folder / WEIGHTS)


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


def poison(folder: Path) -> None:
    change_weights(folder, "experts.lora_B.weight", lambda t: t.index_fill(0, torch.tensor([3]), float("nan")))


def reshape(folder: Path) -> None:
    change_weights(folder, "q_proj.lora_A.weight", lambda t: t[:, :-1].contiguous())


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": ')


def dora(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, r"adapter_model\.safetensors: .*the file is missing or damaged"),
        (poison, r"experts\.lora_B\.weight holds NaN or infinite values; the adapter is broken"),
        (reshape, r"q_proj\.lora_A\.weight has shape \(4, 31\), the run's adapter \(4, 32\)"),
        (without_config, r"adapter_config\.json: .*No such file"),
        (broken_config, r"adapter_config\.json: .*incomplete or damaged"),
        (dora, r"use_dora: only plain LoRA"),
    ],
)
def test_a_damaged_adapter_is_refused_and_changes_nothing(
    tmp_path: Path, made: tuple[Path, Path], damage: object, says: str
) -> None:
    base, sound = made
    folder = Path(shutil.copytree(sound, tmp_path / "a"))
    damage(folder)
    model = adapted(base, ADAPTER)
    before = adapter_digest(model, ADAPTER)
    with pytest.raises(ModelError, match=says):
        load_adapter(model, ADAPTER, folder, base=str(base))
    assert adapter_digest(model, ADAPTER) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 8}, r"made with rank 4, method\.adapter says 8"),
        ({"alpha": 5.0}, r"made with alpha 8\.0, method\.adapter says 5\.0"),
        ({"rslora": True}, r"made with rslora False, method\.adapter says True"),
        ({"targets": ["attention"]}, r"8 tensors do not match .* only in the file, is model\.layers\.1\.mlp\.experts"),
        ({"targets": ["attention", "experts", "mlp"]}, r"6 tensors do not match .* only in the run's adapters, is mod"),
    ],
)
def test_an_adapter_made_otherwise_is_refused(made: tuple[Path, Path], settings: dict[str, object], says: str) -> None:
    base, folder = made
    adapter = ADAPTER.model_copy(update=settings)
    model = load(base)
    add_adapters(model, adapter, seed=0)
    with pytest.raises(ModelError, match=says):
        load_adapter(model, adapter, folder, base=str(base))


def test_updates_of_experts_that_the_run_leaves_alone_are_refused(made: tuple[Path, Path]) -> None:
    base, folder = made
    model = load(base)
    add_adapters(model, ADAPTER, seed=0, chosen={1: [0, 2], 2: [0, 2]})
    with pytest.raises(ModelError, match=r"the file has an update of expert 1, which this run does not adapt"):
        load_adapter(model, ADAPTER, folder, base=str(base))


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, made: tuple[Path, Path]) -> None:
    """The same architecture, the same shapes, other weights."""
    _, folder = made
    other = tiny.save_model("qwen3_moe", tmp_path / "other", seed=1)
    model = adapted(other, ADAPTER)
    with pytest.raises(ModelError, match=r"trained on another base model than .*other \(fingerprint [0-9a-f]{12} then"):
        load_adapter(model, ADAPTER, folder, base=str(other))


def test_a_base_is_known_by_its_contents_wherever_it_lies(tmp_path: Path, made: tuple[Path, Path]) -> None:
    base, _ = made
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    assert base_fingerprint(moved) == base_fingerprint(base)
    file = moved / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert base_fingerprint(moved) != base_fingerprint(base)


def test_nan_in_a_base_weight_is_named(made: tuple[Path, Path]) -> None:
    model = load(made[0])
    refuse_nan(model, source="m")
    model.model.layers[1].mlp.experts.down_proj.data[3, 0, 0] = float("inf")
    with pytest.raises(ModelError, match=r"m: model\.layers\.1\.mlp\.experts\.down_proj holds 1 NaN or inf"):
        refuse_nan(model, source="m")


def test_nan_in_an_adapter_is_not_saved(tmp_path: Path, made: tuple[Path, Path]) -> None:
    model = adapted(made[0], ADAPTER)
    model.model.layers[2].mlp.experts.gatewright_lora.B["down_proj"].data[5, 1, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"not saved: model\.layers\.2\.mlp\.experts\.lora_B\.weight holds NaN"):
        save_adapter(model, ADAPTER, tmp_path / "a", base=str(made[0]))
    assert not (tmp_path / "a").exists()


def test_digests_of_parts_add_up_to_that_of_the_whole(made: tuple[Path, Path]) -> None:
    """As on ranks that hold different experts: what each has, in any order, sums to the whole."""
    base, _ = made
    only = spec.Adapter(rank=4, targets=["experts"])
    whole = adapted(base, only)
    digest = adapter_digest(whole, only)
    halves = []
    for numbers in ([4, 5, 6, 7], [0, 1, 2, 3]):
        part = load(base)
        add_adapters(part, only, seed=0, chosen={1: numbers, 2: numbers})
        for layer in (1, 2):
            mine: ExpertLora = part.model.layers[layer].mlp.experts.gatewright_lora
            all_: ExpertLora = whole.model.layers[layer].mlp.experts.gatewright_lora
            for name in mine.A:
                mine.A[name].data.copy_(all_.A[name].data[numbers])
                mine.B[name].data.copy_(all_.B[name].data[numbers])
        halves.append(int(adapter_digest(part, only), 16))
    assert f"{sum(halves) % 2**256:064x}" == digest
    whole.model.layers[1].mlp.experts.gatewright_lora.B["down_proj"].data[0, 0, 0] += 1e-6
    assert adapter_digest(whole, only) != digest


def test_the_proof_at_the_end_sees_a_file_that_is_not_the_adapter(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe")
    trainer = set_up(run, log=lambda event: None)
    adapter, base, batch = run.adapter, run.model.path, trainer.loader.step(0)[0]
    save_adapter(trainer.model, adapter, tmp_path / "a", base=base)
    digest = adapter_digest(trainer.model, adapter)
    prove_reload(trainer.model, head_of(trainer.model), adapter, tmp_path / "a", base=base, batch=batch)
    assert adapter_digest(trainer.model, adapter) == digest
    assert all(entry.tensor.requires_grad for entry in adapter_entries(trainer.model, adapter).values())
    change_weights(tmp_path / "a", "experts.lora_B.weight", lambda t: t + 1e-3)
    with pytest.raises(CheckpointError, match=r"a tensor read back differs from the trained one"):
        prove_reload(trainer.model, head_of(trainer.model), adapter, tmp_path / "a", base=base, batch=batch)


def train(run: Run) -> int:
    return loop.train(run, console=Console(quiet=True))


def test_a_run_goes_on_from_an_adapter_and_refuses_one_of_another_base(tmp_path: Path) -> None:
    first = tiny.make_run(tmp_path, "qwen3_moe", train__steps=2)
    assert train(first) == 0
    start = str(first.folder / "adapter")
    second = tiny.make_run(tmp_path, "qwen3_moe", run="second", method__adapter__start=start)
    fresh = set_up(second, log=lambda event: None)
    saved = tiny.read_tensors(first.folder / "adapter")
    for key, entry in adapter_entries(fresh.model, second.adapter).items():
        assert torch.equal(entry.fold(entry.tensor.detach()), saved[key])
    other = tiny.make_run(tmp_path, "qwen3_moe", run="third", method__adapter__start=start)
    tiny.save_model("qwen3_moe", Path(other.model.path), seed=7, vocab_size=272)
    with pytest.raises(ModelError, match=r"trained on another base model"):
        set_up(other, log=lambda event: None)


def test_the_router_is_in_the_adapter_where_it_trains_or_its_bias_moves(tmp_path: Path) -> None:
    trained = tiny.make_run(tmp_path, "mixtral", router__train=True)
    assert trained.adapter.full == ["router"] and trained.router_trains
    moved = tiny.make_run(tmp_path, "mixtral", router__bias_rate=0.1)
    assert moved.adapter.full == ["router"] and not moved.router_trains
    frozen = tiny.make_run(tmp_path, "mixtral")
    assert frozen.adapter.full == [] and not frozen.router_trains
    assert train(trained) == 0
    before = dict(load(Path(trained.model.path)).named_parameters())
    after = tiny.read_tensors(trained.folder / "adapter")
    gate = "model.layers.0.mlp.gate.weight"
    assert (after[f"base_model.model.{gate}"] - before[gate]).abs().max() > 0
