"""FP8 checkpoints as a frozen base: made dense at load, kept as they are, or made NF4; and what is refused."""

import itertools
import json
from pathlib import Path

import pytest
import tiny
import torch
from fp8_made import save_fp8
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from gatewright.model.attention import choose_kernel
from gatewright.model.fp8 import Fp8Weight, fp8_weight
from gatewright.model.load import load_model
from gatewright.model.quantized import QuantizedWeight, quantized_names, weight_bytes
from gatewright.model.quantized_load import Quantize
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError

CPU = torch.device("cpu")


def load(
    folder: Path, quantize: Quantize = "none", dtype: str = "float32", notes: list[str] | None = None
) -> PreTrainedModel:
    kernel = choose_kernel(CPU, getattr(torch, dtype))
    heard: list[str] = [] if notes is None else notes
    model = spec.Model(path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    return load_model(model, device=CPU, kernel=kernel, quantize=quantize, note=heard.append)


BLOCKS = [(8, 8), (16, 32), (128, 128), "tensor", "row"]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_is_made_dense_or_kept_and_stands_for_the_same_numbers(
    kind: str, block: tuple[int, int] | str, tmp_path: Path
) -> None:
    folder = save_fp8(tiny.save_model(kind, tmp_path / "base"), tmp_path / "fp8", block=block)
    wanted = dict(load(folder / "dense").named_parameters())
    notes: list[str] = []
    made, kept = load(folder, "none", notes=notes), load(folder, "fp8", notes=notes)
    assert not quantized_names(made)
    names = set(quantized_names(kept))
    assert any("experts" in name for name in names) == (kind == "qwen3_moe")
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    for name, parameter in kept.named_parameters():
        assert (name in names) == ("_proj" in name), name
        dense = parameter.dense(torch.float32) if isinstance(parameter, QuantizedWeight) else parameter
        assert torch.equal(dense, wanted[name]), name
    assert "FP8" in notes[0] and "made float32 at load" in notes[0]
    assert "method.quantize fp8" in notes[1]


def test_an_fp8_checkpoint_can_be_stored_in_nf4(tmp_path: Path) -> None:
    folder = save_fp8(tiny.save_model("qwen3_moe", tmp_path / "base"), tmp_path / "fp8")
    from_fp8, from_dense = load(folder, "nf4"), load(folder / "dense", "nf4")
    assert quantized_names(from_fp8) == quantized_names(from_dense) != []
    for (name, one), (_, other) in zip(from_fp8.named_parameters(), from_dense.named_parameters(), strict=True):
        if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight):
            one, other = one.dense(torch.float32), other.dense(torch.float32)
        assert torch.equal(one, other), name


def test_fp8_keeps_the_files_bytes(tmp_path: Path) -> None:
    folder = save_fp8(tiny.save_model("qwen3_moe", tmp_path / "base"), tmp_path / "fp8")
    kept = load(folder, "fp8", dtype="bfloat16")
    files = load_file(folder / "model.safetensors")
    in_file = sum(t.numel() * (1 if t.dtype.itemsize == 1 else 4 if "scale" in n else 2) for n, t in files.items())
    assert weight_bytes(kept) == in_file


def test_blocks_that_do_not_divide_the_shape() -> None:
    torch.manual_seed(0)
    codes = torch.randn(2, 10, 13).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, 4) + 0.5
    weight = fp8_weight(codes, scale, block=(4, 4), name="w")
    wanted = codes.float()
    for e, i, j in itertools.product(*map(range, codes.shape)):
        wanted[e, i, j] *= scale[e, i // 4, j // 4]
    assert torch.equal(weight.dense(torch.float32), wanted)
    assert torch.equal(weight.refined().dense(torch.float32), wanted)
    assert weight.refined().block == (2, 1)


def test_large_matrices_go_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatewright.model.fp8.SLAB", 64)
    codes, scale = torch.randn(3, 20, 12).to(torch.float8_e4m3fn), torch.rand(3, 5, 3)
    weight = Fp8Weight({"codes": codes, "scale": scale}, shape=codes.shape, dtype=torch.float32, block=(4, 4))
    wanted = codes.float() * scale.repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert torch.equal(weight.dense(torch.float32), wanted)


def test_fp8_is_refused_on_a_plain_checkpoint(tmp_path: Path) -> None:
    folder = tiny.save_model("llama", tmp_path / "base")
    with pytest.raises(ModelError, match="holds plain floats; set nf4"):
        load(folder, "fp8")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_quantised_checkpoints_are_refused_in_words(method: str, tmp_path: Path) -> None:
    folder = tiny.save_model("llama", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=rf"quantised already \({method}\).*unquantised or FP8 release"):
        load(folder)


def damage(folder: Path, change: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    if change == "no scale":
        del tensors[name + "_scale_inv"]
    elif change == "wrong scale":
        tensors[name + "_scale_inv"] = torch.ones(3, 5)
    elif change == "nan scale":
        tensors[name + "_scale_inv"][0, 0] = float("nan")
    elif change == "nan code":
        tensors[name].view(torch.uint8)[1, 2] = 0xFF
    elif change == "integers":
        tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int8)
    elif change == "an expert is missing":
        tensors = {n: t for n, t in tensors.items() if "layers.1.mlp.experts.3.up_proj" not in n}
    elif change == "wrong shape":
        tensors[name], tensors[name + "_scale_inv"] = tensors[name][:-8], tensors[name + "_scale_inv"][:-1]
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no scale", "q_proj.weight is FP8 but has no scale beside it"),
        ("wrong scale", r"q_proj.weight: an FP8 weight of shape .* with a scale of shape \(3, 5\)"),
        ("nan scale", "q_proj.weight: its FP8 scale holds NaN"),
        ("nan code", "q_proj.weight: holds NaN or infinite weights"),
        ("integers", "q_proj.weight is stored as I8 without a scale we know"),
        ("an expert is missing", "the files hold 7 and 8 experts, config.json says 8"),
        ("wrong shape", "another shape than config.json says"),
    ],
)
@pytest.mark.parametrize("quantize", ["none", "fp8", "nf4"])
def test_damaged_fp8_checkpoints_are_named(quantize: Quantize, change: str, words: str, tmp_path: Path) -> None:
    folder = save_fp8(tiny.save_model("qwen3_moe", tmp_path / "base"), tmp_path / "fp8")
    damage(folder, change)
    with pytest.raises(ModelError, match=words):
        load(folder, quantize)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_codes_that_are_no_numbers_are_known(dtype: torch.dtype) -> None:
    for code in range(256):
        codes = torch.tensor([[code]], dtype=torch.uint8).view(dtype)
        if codes.float().isfinite().all():
            assert fp8_weight(codes, torch.ones(1), block=None, name="w").dense(torch.float32) == codes.float()
        else:
            with pytest.raises(ModelError, match="w: holds NaN or infinite"):
                fp8_weight(codes, torch.ones(1), block=None, name="w")
