"""NF4 base weights: the numbers, what stays in memory, training on top of them, and what is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from bitsandbytes import functional as bnb
from families import FAMILIES, save_family
from fp8_made import save_fp8
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from gatewright.model.adapters import add_adapters
from gatewright.model.attention import choose_kernel
from gatewright.model.experts import find_experts, plain_experts, sort_rows
from gatewright.model.four_bit import PIECE, quantize_nf4
from gatewright.model.load import load_model
from gatewright.model.quantized import QuantizedWeight, quantized_names
from gatewright.model.quantized_load import Quantize
from gatewright.model.recompute import recompute
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError, RunFileError
from gatewright.spec.run import Run
from gatewright.train import loop
from gatewright.train.forward import hidden_states
from gatewright.train.setup import Trainer, set_up
from gatewright.train.state import restore
from gatewright.train.step import train_step

CPU = torch.device("cpu")


def load(folder: Path, quantize: Quantize = "nf4", dtype: str = "float32") -> PreTrainedModel:
    kernel = choose_kernel(CPU, getattr(torch, dtype))
    return load_model(spec.Model(path=str(folder), dtype=dtype), device=CPU, kernel=kernel, quantize=quantize)


def quantize(value: Tensor, name: str = "w") -> QuantizedWeight:
    matrices = value.view(-1, *value.shape[-2:])
    return quantize_nf4(matrices, shape=value.shape, dtype=value.dtype, device=CPU, name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 64), (1100, 1024), (4, 64, 96)])
def test_codes_are_those_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for dense, matrix in zip(
        quantize(value).dense(dtype).view(-1, *shape[-2:]), value.view(-1, *shape[-2:]), strict=True
    ):
        # Flat: bitsandbytes 0.50 reads a matrix whose rows are no whole blocks with wrong absmaxes on a CPU.
        codes, state = bnb.quantize_4bit(matrix.reshape(-1), blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(dense.reshape(-1), bnb.dequantize_4bit(codes, state).view(-1))
    assert value.numel() > PIECE or shape != (1100, 1024)


@pytest.mark.parametrize("shape", [(5, 7), (3, 9, 11), (1, 65), (2, 1, 1)])
def test_shapes_that_no_block_divides_are_padded(shape: tuple[int, ...]) -> None:
    """Each matrix by itself, so that what an expert becomes does not depend on its neighbours."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight = quantize(value)
    assert weight.shape == value.shape
    made = weight.dense(torch.float32).view(-1, *shape[-2:])
    for dense, matrix in zip(made, value.view(-1, *shape[-2:]), strict=True):
        codes, state = bnb.quantize_4bit(matrix.reshape(-1), blocksize=64, compress_statistics=False, quant_type="nf4")
        # The second quantisation, of the absmaxes, moves them by less than 2 %.
        torch.testing.assert_close(dense, bnb.dequantize_4bit(codes, state).view_as(dense), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 64, 96), (4, 128, 1100), (3, 9, 11)])
def test_an_expert_is_packed_alike_whoever_its_neighbours_are(shape: tuple[int, ...]) -> None:
    value = (
        torch.randn(shape, generator=torch.Generator().manual_seed(2)) * torch.arange(1, shape[0] + 1)[:, None, None]
    )
    together = quantize(value)
    for begin, end in ((0, 1), (1, 3), (shape[0] - 1, shape[0])):
        some = quantize(value[begin:end])
        assert torch.equal(some.dense(torch.float32), together.dense(torch.float32)[begin:end])
        for name, part in some.parts.items():
            per_expert = len(together.parts[name]) // shape[0] * len(value[begin:end])
            assert len(part) == per_expert, name
            assert torch.equal(part, together.parts[name].view(shape[0], -1)[begin:end].view(part.shape)), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float, tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.5.down_proj.weight"][3, 4] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj, expert 5: holds NaN or infinite"):
        load(folder)


def test_blocks_are_quantised_and_what_decides_or_sees_every_token_is_not(tmp_path: Path) -> None:
    model = load(tiny.save_model("qwen2_moe", tmp_path / "base"))
    names = set(quantized_names(model))
    for name, _ in model.named_parameters():
        small = name.endswith("proj.weight") or ".experts." in name
        assert (name in names) == small, name


def save_base(kind: str, folder: Path, storage: Quantize) -> Path:
    base = tiny.save_model(kind, folder / "plain", vocab_size=272)
    tiny.save_tokenizer(base)
    return save_fp8(base, folder / "fp8") if storage == "fp8" else base


def save_dense(model: PreTrainedModel, base: Path, folder: Path) -> Path:
    """A checkpoint in plain floats of what the model's frozen weights stand for."""
    plain = load(base, "none", str(model.dtype).removeprefix("torch."))
    frozen = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            weight = frozen[name]
            parameter.copy_(weight.dense(model.dtype) if isinstance(weight, QuantizedWeight) else weight)
    plain.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


def run_on(folder: Path, base: Path, kind: str, storage: Quantize, **changes: object) -> Run:
    tiny.make_run(folder, kind)
    return tiny.make_run(folder, kind, model__path=str(base), method__quantize=storage, **changes)


def a_step(trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step at learning rate 0, with pairs whose B is not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    result = train_step(
        trainer.model, trainer.head, trainer.optimizer, trainer.gradients, trainer.loader.step(0),
        lr=0.0, clip_norm=None, loss_chunk_tokens=64,
    )  # fmt: skip
    return result.loss, {n: p.grad.clone() for n, p in trainer.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_step_equals_one_on_the_weights_it_stands_for(
    kind: str, storage: Quantize, dtype: str, checkpointing: str, tmp_path: Path
) -> None:
    base = save_base(kind, tmp_path, storage)
    changes = {"train__checkpointing": checkpointing, "model__dtype": dtype}
    small = set_up(run_on(tmp_path, base, kind, storage, **changes), log=lambda event: None)
    stands_for = base / "dense" if storage == "fp8" else save_dense(small.model, base, tmp_path / "dense")
    plain = set_up(run_on(tmp_path, stands_for, kind, "none", **changes), log=lambda event: None)
    assert quantized_names(small.model) and not quantized_names(plain.model)
    (loss, grads), (wanted, wanted_grads) = a_step(small), a_step(plain)
    assert loss == wanted
    assert grads.keys() == wanted_grads.keys()
    for name, gradient in grads.items():
        assert torch.equal(gradient, wanted_grads[name]), name
    assert any(g.abs().sum() > 0 for g in grads.values())


ONE_ROW = {
    "input_ids": torch.arange(14)[None],
    "position_ids": torch.arange(14)[None],
    "cu_seq_lens_q": torch.tensor([0, 14], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 14], dtype=torch.int32),
    "max_length_q": 14,
    "max_length_k": 14,
    "use_cache": False,
}


def family_gradients(model: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, Tensor]:
    """Of every adapter, from one recomputed row, B being no zero."""
    add_adapters(model, spec.Adapter(rank=4, targets=list(targets)), seed=0)
    recompute(model, "full")
    model.train()
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trains.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    logits = model(**ONE_ROW).logits[0]
    nn.functional.cross_entropy(logits[:-1], ONE_ROW["input_ids"][0, 1:]).backward()
    return {name: p.grad for name, p in trains.items()}


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3", "deepseek_v4", "gpt_oss", "granitemoehybrid", "llama4"])
def test_families_train_on_nf4_as_on_the_weights_it_stands_for(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path)
    small, plain = load(folder), load(folder, "none")
    with torch.no_grad():
        for weight, parameter in zip(small.parameters(), plain.parameters(), strict=True):
            parameter.copy_(dense_of(weight))
    got, wanted = (family_gradients(model, FAMILIES[name].targets) for model in (small, plain))
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, atol=1e-6, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_nothing_dense_is_kept_for_the_backward_pass(checkpointing: str, tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path, "nf4")
    changes = {"train__checkpointing": checkpointing, "method__adapter__rank": 3}
    trainer = set_up(run_on(tmp_path, base, "qwen3_moe", "nf4", **changes), log=lambda event: None)
    plain = set_up(run_on(tmp_path, base, "qwen3_moe", "none", **changes), log=lambda event: None)
    sizes = {p.numel() for p in trainer.model.parameters() if isinstance(p, QuantizedWeight)}
    kept = saved_elements(trainer)
    assert kept and not sizes & kept
    if checkpointing == "none":
        assert sizes & saved_elements(plain)  # which keeps its linear layers' weights, as autograd does


def saved_elements(trainer: Trainer) -> set[int]:
    """Sizes, in elements, of the storage behind every tensor that a forward pass keeps for the backward pass."""
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        assert not isinstance(tensor, QuantizedWeight)
        kept.add(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    trainer.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(trainer.model, trainer.loader.step(0)[0]).sum().backward()
    return kept


def test_experts_with_a_norm_behind_them_get_the_same_gradients(tmp_path: Path) -> None:
    """The path by autograd alone, for experts that the one with a written-out backward pass does not cover."""
    model = load(tiny.save_model("qwen3_moe", tmp_path / "base"))
    experts = next(iter(find_experts(model).values()))
    x_TH = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    index_Tk, weight_Tk = torch.randint(8, (20, 2), generator=torch.Generator().manual_seed(3)), torch.rand(20, 2)
    grads = []
    for _ in range(2):
        x = x_TH.clone().requires_grad_()
        rows = sort_rows(experts, index_Tk, weight_Tk)
        y_TH = plain_experts(experts, x, weight_Tk, [None] * 4, rows, None)
        y_TH.square().sum().backward()
        grads.append(x.grad)
        for name in ("gate_up_proj", "down_proj"):
            experts._parameters[name] = nn.Parameter(dense_of(experts._parameters[name]), requires_grad=False)
    assert torch.equal(grads[0], grads[1])


def dense_of(weight: Tensor) -> Tensor:
    return weight.dense(torch.float32) if isinstance(weight, QuantizedWeight) else weight


def result(run: Run) -> dict[str, bytes]:
    assert loop.train(run, console=Console(quiet=True)) == 0
    last = max((run.folder / "checkpoints").glob("step-*"))
    return {
        "adapter": (run.folder / "adapter" / "adapter_model.safetensors").read_bytes(),
        "state": (last / "state.safetensors").read_bytes(),
    }


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_a_resumed_run_is_the_same_run(storage: Quantize, tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path, storage)
    changes = {"train__checkpointing": "full", "train__save_every_steps": 2, "train__steps": 6}
    whole = result(run_on(tmp_path, base, "qwen3_moe", storage, run="whole", **changes))
    parted = run_on(tmp_path, base, "qwen3_moe", storage, run="parted", **changes)
    result(parted)
    for step in (4, 6):
        shutil.rmtree(parted.folder / "checkpoints" / f"step-{step:08d}")
    assert result(parted) == whole


def test_the_base_in_few_bits_is_another_run(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path, "nf4")
    result(run_on(tmp_path, base, "llama", "nf4"))
    with pytest.raises(RunFileError, match=r"method\.quantize"):
        loop.train(run_on(tmp_path, base, "llama", "none", train__steps=8), console=Console(quiet=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_stock_peft_loads_the_adapter_on_the_plain_base(kind: str, tmp_path: Path) -> None:
    base = save_base(kind, tmp_path, "nf4")
    run = run_on(tmp_path, base, kind, "nf4", train__steps=3)
    result(run)
    small = set_up(run, log=lambda event: None)
    restore(max((run.folder / "checkpoints").glob("step-*")), trainer=small, run=run)
    stands_for = save_dense(small.model, base, tmp_path / "dense")
    theirs = PeftModel.from_pretrained(tiny.load_plain(stands_for), str(run.folder / "adapter"))
    batch = small.loader.step(0)[0]
    document = batch.tokens_T[: batch.lengths[0]]
    ours = small.head.logits(hidden_states(small.model, batch))[: len(document)]
    torch.testing.assert_close(ours, theirs(input_ids=document[None]).logits[0], atol=1e-5, rtol=1e-5)
    PeftModel.from_pretrained(tiny.load_plain(base), str(run.folder / "adapter"))


def test_without_bitsandbytes_the_extra_is_named(tmp_path: Path) -> None:
    base = tiny.save_model("llama", tmp_path / "base")
    absent = tmp_path / "absent" / "bitsandbytes"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('no such package')\n")
    code = (
        "import torch; from gatewright.model.load import load_model;"
        "from gatewright.model.attention import choose_kernel;"
        "from gatewright.spec.run import Model; cpu = torch.device('cpu');"
        f"load_model(Model(path={str(base)!r}), device=cpu, kernel=choose_kernel(cpu, torch.bfloat16), quantize='nf4')"
    )
    env = os.environ | {"PYTHONPATH": str(absent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert 'pip install "gatewright[quantize]"' in done.stderr


def test_a_module_takes_its_packed_tensors_along() -> None:
    """To another device or type, and alone: what is not a linear layer's product is refused in words."""
    linear = nn.Linear(96, 20)
    value = torch.randn(20, 96)
    linear.weight = nn.Parameter(quantize(value), requires_grad=False)
    wanted = linear.weight.dense(torch.bfloat16)
    linear.to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16 and torch.equal(linear.weight.dense(torch.bfloat16), wanted)
    with pytest.raises(ModelError, match=r"applies aten\.mul\.Tensor to a weight that is stored in few bits"):
        linear.weight * 2
    linear.to("meta")
    assert linear.weight.is_meta and all(part.is_meta for part in linear.weight.parts.values())
    assert linear.weight.shape == value.shape


def test_questions_are_answered_on_a_packed_base(tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path, "nf4")
    evaluate = {"data": str(tmp_path / "heldout.jsonl"), "exact_match": 3, "max_new_tokens": 4}
    run = run_on(tmp_path, base, "qwen3_moe", "nf4", evaluate=evaluate, train__steps=2)
    result(run)
    first, last = tiny.events(run, "evaluate")
    assert first["asked"] == last["asked"] == 3 and last["loss"] < first["loss"]
    [note] = [e for e in tiny.events(run, "finding") if "method.quantize nf4" in str(e["text"])]
    assert "router" in str(note["text"])
