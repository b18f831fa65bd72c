"""Rehearsal: fake tensors count what real ones count, two depths give the full one, and published runs are met."""

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SIZES
from fp8_made import save_fp8
from tiny import config, save_model
from torch import Tensor
from transformers import PretrainedConfig

from gatewright.model import attention, expert_lora
from gatewright.model.load import load_model
from gatewright.model.quantized import weight_bytes
from gatewright.parallel.layout import Layout
from gatewright.parallel.ranks import alone
from gatewright.probe.fake_routing import score_functions
from gatewright.probe.rehearsal import build, config_of, packed_batch, rehearse, take_steps
from gatewright.probe.rehearsal_depth import choose_depths
from gatewright.probe.rehearsal_observe import Observed, observe_depth, observe_model
from gatewright.probe.rehearsal_plain import PlainStep, rehearse_plain
from gatewright.probe.rehearsal_text import render
from gatewright.spec.errors import ModelError, RunFileError
from gatewright.spec.rehearsal import Held, Rehearsal
from gatewright.spec.run import Run

CATALOGUE = Path(__file__).parents[2] / "gatewright" / "catalog" / "models"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CPU = attention.Kernel("sdpa per document", "the test compares with this machine", attention.attend_each_document)
ONE = alone(torch.device("cpu"))
CUBLAS = 2 * 8_519_680
"""Default workspace of cuBLAS before Hopper, once for each of the two threads (torch's CUBLAS_WORKSPACE_CONFIG)."""


def make_run(targets: list[str] | None, *, model: str = "tiny", dtype: str = "float32", **train: object) -> Run:
    return Run.model_validate(
        {
            "run": "rehearsed",
            "model": {"path": model, "dtype": dtype},
            "method": {"adapter": {"rank": 4, "targets": targets}} if targets else {},
            "data": {"train": "none.jsonl"},
            "train": {"tokens_per_step": 100, "steps": 1, "lr": 1e-3, "loss_chunk_tokens": 64} | train,
        }
    )


def changed(targets: list[str] | None = ("experts",), /, **sections: dict[str, object]) -> Run:
    """make_run's run with more keys in its sections."""
    values = make_run(targets and list(targets)).model_dump()
    for name, keys in sections.items():
        values[name] = keys if isinstance(values[name], str) else values[name] | keys
    return Run.model_validate(values)


def moe_config(kind: str) -> PretrainedConfig:
    """A tiny mixture of experts with a dense first layer; DeepSeek's scores are no softmax, and it has a bias."""
    if kind == "qwen3_moe":
        return config(kind)
    return config_of(SIZES | FAMILIES[kind].config | {"model_type": kind})


def add_as_a_gpu_does(into_SN: Tensor, low_Sr: Tensor, w_ErN: Tensor, ends_E: Tensor, scale: float) -> Tensor:
    """A CPU adds an expert's products in place, one by one; what is rehearsed is a GPU, which has no such kernel."""
    return into_SN.add_(expert_lora.grouped_mm(low_Sr, w_ErN, ends_E), alpha=scale)


def phases(rehearsal: Rehearsal) -> dict[str, int]:
    return {phase.phase: phase.bytes for phase in rehearsal.phases}


@pytest.mark.parametrize(
    ("kind", "targets", "checkpointing"),
    [
        ("llama", ["attention", "mlp"], "full"),
        ("llama-tied", None, "none"),
        ("qwen3_moe", ["attention", "experts"], "selective"),
        ("qwen3_moe", None, "full"),
        ("qwen2_moe", ["experts", "shared_experts"], "none"),
    ],
)
def test_fake_tensors_count_what_real_ones_do_to_the_byte(
    kind: str, targets: list[str], checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same two steps on real tensors, counted by the same tracker: every peak of every layer, every birth."""
    monkeypatch.setattr(expert_lora, "_add_products", add_as_a_gpu_does)
    run, batches = make_run(targets, checkpointing=checkpointing), [packed_batch([50, 70, 33])]

    def make() -> torch.nn.Module:
        return build(config(kind), run, CPU, ONE)

    def steps(model: torch.nn.Module, live: object) -> Held:
        return take_steps(model, run, batches, live, ONE)

    fake = observe_depth(make, steps, 3)
    torch.manual_seed(0)
    real: Observed = observe_model(make(), steps)
    assert fake == real
    assert len(real.peaks) >= 3 * 2 + 3  # two passes through three layers, and what surrounds them


@pytest.mark.parametrize(
    ("kind", "targets", "router"),
    [
        ("qwen3_moe", ["experts"], {"balance": 0.01, "z": 1e-3, "train": True}),
        ("qwen3_moe", None, {"balance": 0.01, "balance_over": "sequence"}),
        ("deepseek_v3", ["attention"], {"balance": 0.01, "balance_over": "micro", "train": True, "bias_rate": 1e-3}),
    ],
)
def test_losses_of_the_router_count_as_they_do_on_real_tensors(
    kind: str, targets: list[str] | None, router: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte; the score function, which real routers tell by their values, is the one found beforehand."""
    monkeypatch.setattr(expert_lora, "_add_products", add_as_a_gpu_does)
    run, batches = changed(targets, router=router), [packed_batch([50, 70, 33])]

    def make() -> torch.nn.Module:
        return build(moe_config(kind), run, CPU, ONE)

    def steps(model: torch.nn.Module, live: object) -> Held:
        return take_steps(model, run, batches, live, ONE, scores=scores)

    with torch.device("meta"):
        scores = score_functions(make())
    fake = observe_depth(make, steps, 3)
    torch.manual_seed(0)
    assert fake == observe_model(make(), steps)
    plain = observe_depth(make, lambda model, live: take_steps(model, changed(targets), batches, live, ONE), 3)
    assert max(peak.bytes for peak in fake.peaks.values()) > max(peak.bytes for peak in plain.peaks.values())


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("trains", [True, False])
def test_score_functions_are_those_that_the_model_tells(kind: str, trains: bool) -> None:
    """Of a router that trains in float32 before a model in bfloat16, too."""
    run = changed(model={"path": "tiny", "dtype": "bfloat16"}, router={"train": trains})
    with torch.device("meta"):
        told = score_functions(build(moe_config(kind), run, CPU, ONE))
    assert told == dict.fromkeys((1, 2), "softmax" if kind == "qwen3_moe" else "sigmoid")


def test_a_choice_of_experts_is_rehearsed_as_if_it_took_every_row() -> None:
    some = changed(method={"adapter": {"rank": 4, "targets": ["experts"], "experts": {"most_routed": 0.5}}})
    shape = config("qwen3_moe")
    chosen, every = (rehearse(run, lengths=[40, 60], config=shape) for run in (some, changed()))
    assert 2 * chosen.held.weights == every.held.weights
    assert 2 * chosen.held.optimizer == every.held.optimizer
    assert chosen.peak.bytes < every.peak.bytes
    assert chosen.assumed == ("every row goes to an expert that has an adapter: an upper bound",)
    assert "assumed: every row" in render(chosen)


def test_the_rank_with_most_of_the_named_experts_is_rehearsed() -> None:
    """One of them on the first of two ranks, three on the other."""
    layout, shape = Layout(ranks=2, ep=2), config("qwen3_moe")
    layers = [{"layer": 1, "experts": [0, 5]}, {"layer": 2, "experts": [4, 7]}]
    some = changed(method={"adapter": {"rank": 4, "targets": ["experts"], "experts": {"layers": layers}}})
    chosen, every = (rehearse(run, lengths=[40, 60], config=shape, layout=layout) for run in (some, changed()))
    assert 8 * chosen.held.weights == 3 * every.held.weights


def test_a_capacity_bounds_what_a_rank_of_experts_receives() -> None:
    layout, shape = Layout(ranks=2, ep=2), config("qwen3_moe")
    free, bound = (
        rehearse(run, lengths=[40, 60], config=shape, layout=layout, expert_load=1.5)
        for run in (changed(), changed(router={"capacity": 1.1}))
    )
    assert bound.peak.bytes < free.peak.bytes
    assert bound.assumed[0].startswith("its experts receive 1.1 times")
    assert (
        rehearse(changed(router={"capacity": 1.1}), lengths=[40, 60], config=shape).held
        == rehearse(changed(), lengths=[40, 60], config=shape).held
    )


def test_dropout_of_expert_adapters_is_rehearsed() -> None:
    shape = config("qwen3_moe")
    dropped = changed(method={"adapter": {"rank": 4, "targets": ["experts"], "dropout": 0.1}})
    with_masks, without = (rehearse(run, lengths=[40, 60], config=shape) for run in (dropped, changed()))
    assert phases(with_masks)["forward"] > phases(without)["forward"]
    assert with_masks.held == without.held


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("block", [(8, 8), "row"])
def test_fp8_takes_what_the_loader_keeps_of_it(kind: str, block: tuple[int, int] | str, tmp_path: Path) -> None:
    """The frozen base, to the byte, from config.json alone."""
    folder = save_fp8(save_model(kind, tmp_path / "base"), tmp_path / "fp8", block=block)
    values = make_run(["attention"], model=str(folder)).model_dump()
    values["method"]["quantize"] = "fp8"
    run = Run.model_validate(values)
    loaded = load_model(run.model, device=torch.device("cpu"), kernel=CPU, quantize="fp8")
    assert rehearse(run, lengths=[30, 40], full_depth=True).held.frozen == weight_bytes(loaded)


@pytest.mark.parametrize(
    ("kind", "targets", "checkpointing", "depths"),
    [
        ("llama", None, "none", (3, 5)),
        ("qwen3_moe", ["attention", "experts"], "selective", (3, 5)),
        ("qwen3_moe", None, "full", (3, 5)),
    ],
)
def test_two_depths_give_the_full_one(kind: str, targets: list[str], checkpointing: str, depths: tuple) -> None:
    run = make_run(targets, checkpointing=checkpointing, clip_norm=None)
    shape = config(kind, num_hidden_layers=7)
    short = rehearse(run, lengths=[64, 100], config=shape)
    full = rehearse(run, lengths=[64, 100], config=shape, full_depth=True)
    assert (short.depths, full.depths) == (depths, (7,))
    assert phases(short) == pytest.approx(phases(full), rel=1e-3)
    assert {p.phase: p.block for p in short.phases} == {p.phase: p.block for p in full.phases}
    assert short.resident_bytes == full.resident_bytes
    assert (short.parameters, short.trainable_parameters) == (full.parameters, full.trainable_parameters)


@pytest.mark.parametrize(
    ("kind", "targets", "checkpointing", "layout", "depths"),
    [
        ("llama", None, "full", Layout(ranks=2, dense="zero3"), (5, 7)),
        ("qwen3_moe", ["attention", "experts"], "none", Layout(ranks=2, ep=2), (3, 5)),
        ("qwen3_moe", None, "selective", Layout(ranks=4, ep=2, dense="zero3"), (5, 7)),
    ],
)
def test_two_depths_give_the_full_one_on_one_rank_of_many(
    kind: str, targets: list[str], checkpointing: str, layout: Layout, depths: tuple
) -> None:
    """To the byte: FSDP gathers ahead and reduces behind, so what neighbours hold must be there at both ends."""
    run, shape = make_run(targets, checkpointing=checkpointing), config(kind, num_hidden_layers=9)
    short = rehearse(run, lengths=[64, 100], config=shape, layout=layout)
    full = rehearse(run, lengths=[64, 100], config=shape, layout=layout, full_depth=True)
    assert (short.depths, full.depths) == (depths, (9,))
    assert phases(short) == pytest.approx(phases(full), rel=1e-3)
    assert {p.phase: p.block for p in short.phases} == {p.phase: p.block for p in full.phases}
    assert (short.resident_bytes, short.held) == (full.resident_bytes, full.held)
    assert (short.parameters, short.trainable_parameters) == (full.parameters, full.trainable_parameters)
    alone_ = rehearse(run, lengths=[64, 100], config=shape)
    assert (short.parameters, short.trainable_parameters) == (alone_.parameters, alone_.trainable_parameters)


def test_depths_follow_the_pattern_of_the_layers() -> None:
    assert choose_depths("a" * 32, reach=2) == (4, 6)
    assert choose_depths("ddd" + "m" * 58, reach=2) == (7, 9)
    assert choose_depths("a" * 32) == (2, 4)
    assert choose_depths("a" * 33) == (3, 5)
    assert choose_depths("ddd" + "m" * 58) == (5, 7)
    assert choose_depths("lllf" * 12) == (4, 8)
    assert choose_depths("sssssf" * 4 + "ss") == (8, 14)  # gemma3: the last repetition is cut short
    assert choose_depths("lll" * 12, multiple=2) == (2, 4)
    assert choose_depths("lll" * 12, multiple=4) == (4, 8)
    assert choose_depths("abcd") == (4,)


def test_what_is_resident_is_weights_adapters_and_two_moments() -> None:
    run = make_run(["attention"], dtype="bfloat16")
    done = rehearse(run, lengths=[64], config=config("llama", hidden_size=512, num_attention_heads=8))
    load = phases(done)["load"]
    state = 8 * done.trainable_parameters
    assert load == pytest.approx(2 * done.parameters + 2 * done.trainable_parameters, rel=0.01)
    assert done.resident_bytes - load == pytest.approx(state, rel=0.2)  # and a counter of 512 bytes a tensor


def test_more_micro_batches_keep_gradients_through_the_forward_pass() -> None:
    run, shape = make_run(None), config("llama")
    one, two = (rehearse(run, lengths=[64], config=shape, micro_batches=count) for count in (1, 2))
    grown = phases(two)["forward"] - phases(one)["forward"]
    assert grown == pytest.approx(4 * one.trainable_parameters, rel=0.15)


def test_our_loss_has_no_logits_and_that_of_transformers_has_three_copies() -> None:
    shape = config("llama", vocab_size=50_000)
    ours = rehearse(make_run(["attention"], dtype="bfloat16", checkpointing="full"), lengths=[512], config=shape)
    plain = rehearse_plain(
        shape, PlainStep(rows=1, tokens_per_row=512, lora_rank=4, target_modules=("q_proj",)), model="tiny"
    )
    logits = 512 * 50_000
    assert plain.peak.bytes - phases(plain)["load"] > 12 * logits
    assert ours.peak.bytes - phases(ours)["load"] < 3 * logits
    assert "_log_softmax_backward" in plain.peak.operator


@pytest.mark.parametrize(
    ("name", "step", "measured_gib"),
    [
        ("Mistral-7B-v0.1", PlainStep(rows=4, tokens_per_row=4096), 67.460),
        (
            "PowerLM-3b",
            PlainStep(
                rows=4, tokens_per_row=4096, lora_rank=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")
            ),
            18.785,
        ),
    ],
)
def test_a_published_peak_is_met_within_one_percent(name: str, step: PlainStep, measured_gib: float) -> None:
    """max_memory_allocated of the Hugging Face Trainer on an A100: benchmarks/data/measured_memory.csv."""
    shape = config_of(json.loads((CATALOGUE / f"{name}.json").read_text(encoding="utf-8"))["config"])
    done = rehearse_plain(shape, step, model=name)
    assert (done.peak.bytes + CUBLAS) / 2**30 == pytest.approx(measured_gib, rel=0.01)


def test_only_the_config_of_a_model_folder_is_read(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "base")
    (folder / "model.safetensors").unlink()
    done = rehearse(make_run(["attention", "experts"], model=str(folder)), lengths=[30, 40])
    assert (done.layers, done.tokens, done.attention) == (3, 70, "flash-attn varlen")


def test_the_text_fits_100_columns_and_begins_with_the_answer() -> None:
    done = rehearse(make_run(["attention"]), lengths=[64], config=config("llama", num_hidden_layers=8))
    lines = render(done).splitlines()
    assert lines[0].startswith(f"peak {done.peak.bytes / 2**30:.2f} GiB allocated, in {done.peak.phase}")
    assert max(map(len, lines)) <= 100
    assert "8 layers, extended from 2 and 4" in lines[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_four_bits_take_what_the_loader_makes_of_them(kind: str, tmp_path: Path) -> None:
    """The frozen base, to the byte; and the step makes one weight dense at a time."""
    folder = save_model(kind, tmp_path / "base", hidden_size=128)
    values = make_run(["attention"], model=str(folder)).model_dump()
    values["method"]["quantize"] = "nf4"
    run = Run.model_validate(values)
    loaded = load_model(run.model, device=torch.device("cpu"), kernel=CPU, quantize="nf4")
    done = rehearse(run, lengths=[30, 40], full_depth=True)
    assert done.held.frozen == weight_bytes(loaded)


def test_eight_bit_moments_take_a_quarter() -> None:
    shape = config("llama", hidden_size=512, num_attention_heads=8)
    plain, small = (
        rehearse(make_run(None, dtype="bfloat16", optimizer=name), lengths=[64], config=shape).held
        for name in ("adamw", "adamw8bit")
    )
    assert plain.optimizer == 2 * plain.weights
    assert small.optimizer == pytest.approx(plain.weights, rel=0.05)  # a byte a moment, and a scale every 256


@pytest.mark.parametrize("lengths", [[], [0], [1], [8, 0], [-5]])
def test_lengths_that_make_no_micro_batch_are_refused(lengths: list[int]) -> None:
    with pytest.raises(RunFileError, match="document lengths"):
        rehearse(make_run(None), lengths=lengths, config=config("llama"))


def test_settings_that_cannot_be_rehearsed_are_refused() -> None:
    for run, layout, says in (
        (changed(method={"quantize": "fp8"}), Layout(), "the config of tiny states none"),
        (changed(parallel={"cp": 2}), Layout(ranks=2), "parallel.cp 2"),
    ):
        with pytest.raises(RunFileError, match=says):
            rehearse(run, lengths=[8], config=config("qwen3_moe"), layout=layout)
    with pytest.raises(RunFileError, match="dense model and has no router"):
        rehearse(changed(router={"z": 0.01}, method={"adapter": None}), lengths=[8], config=config("llama"))
    with pytest.raises(RunFileError, match="0 micro-batches"):
        rehearse(make_run(None), lengths=[8], config=config("llama"), micro_batches=0)
    with pytest.raises(ModelError, match=r"'experts' matches no weight"):
        rehearse(make_run(["experts"]), lengths=[8], config=config("llama"))


def test_configs_that_cannot_be_built_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no_such_type"):
        config_of({"model_type": "no_such_type"})
    with pytest.raises(ModelError, match="no model_type"):
        config_of({"hidden_size": 8})
    with pytest.raises(ModelError, match="no folder"):
        rehearse(make_run(None, model=str(tmp_path / "absent")), lengths=[8])
    with pytest.raises(ModelError, match="4 query heads cannot share 3 key heads"):
        rehearse(make_run(None), lengths=[8], config=config("llama", num_key_value_heads=3))
    with pytest.raises(ModelError, match="cannot be rehearsed"):
        rehearse(make_run(None), lengths=[8], config=config("llama", hidden_act="no_such_activation"))
