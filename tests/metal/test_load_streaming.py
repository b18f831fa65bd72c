"""A quantised load holds the model in few bits and one dense expert, never the model as it lies in the files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from families import FAMILIES, SIZES
from fp8_made import LARGEST, save_fp8, stated
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, PreTrainedModel
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.model.quantized import QuantizedWeight, quantized_names
from gatewright.model.quantized_load import Quantize
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError

CPU = torch.device("cpu")
MB = 1e6

CHILD = """
import json, sys
import torch
from gatewright.model.attention import choose_kernel
from gatewright.model.four_bit import bitsandbytes
from gatewright.model.load import load_model
from gatewright.model.quantized import weight_bytes
from gatewright.spec.run import Model

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

torch.set_num_threads(1)
bitsandbytes()
cpu = torch.device("cpu")
kernel = choose_kernel(cpu, torch.bfloat16)
# Once on a small model, so that code which is imported on first use is not counted.
load_model(Model(path=sys.argv[1]), device=cpu, kernel=kernel, quantize=sys.argv[3])
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
model = load_model(Model(path=sys.argv[2]), device=cpu, kernel=kernel, quantize=sys.argv[3])
print(json.dumps({"peak": status("VmHWM") - before, "held": weight_bytes(model)}))
"""


def big_model(folder: Path, **changes: object) -> int:
    """Writes a bfloat16 mixture of 300 MB in many shards, without ever running it; returns its bytes."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64, "num_hidden_layers": 3}
    config = tiny.config("qwen3_moe", **sizes | {"vocab_size": 1024, "mlp_only_layers": []} | changes)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.05, 0.05)
    model.save_pretrained(folder, max_shard_size="40MB" if not changes else "100KB")
    return sum(p.nbytes for p in model.parameters())


def load_in_child(small: Path, big: Path, quantize: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(small), str(big), quantize], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_the_peak_of_a_quantised_load_is_the_small_model_and_one_dense_expert(storage: str, tmp_path: Path) -> None:
    dense = big_model(tmp_path / "big")
    small = tiny.save_model("qwen3_moe", tmp_path / "small")
    big = tmp_path / "big"
    if storage == "fp8":
        small, big = save_fp8(small, tmp_path / "small-fp8"), shards_to_fp8(big)
    measured = load_in_child(small, big, storage)
    peak, held = measured["peak"] / MB, measured["held"] / MB
    print(f"{storage}: bfloat16 {dense / MB:.0f} MB, held {held:.1f} MB, peak {peak:.1f} MB")
    assert dense > 300 * MB
    assert held < {"nf4": 0.28, "fp8": 0.51}[storage] * dense / MB
    # One expert in float32 is 3 MB; the rest is bitsandbytes' temporaries for 2^20 weights and what malloc holds back.
    assert held < peak < held + 60
    assert peak < 0.72 * dense / MB


def shards_to_fp8(folder: Path) -> Path:
    """Puts the experts' weights of every shard in FP8, one scale a 128 × 128 block."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for shard in set(index["weight_map"].values()):
        tensors = load_file(folder / shard)
        for name in [name for name in tensors if ".experts." in name]:
            blocks = tensors[name].float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name], tensors[name + "_scale_inv"] = codes.flatten(2).flatten(0, 1).contiguous(), scale
            index["weight_map"][name + "_scale_inv"] = shard
        save_file(tensors, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated((128, 128))}))
    return folder


def load(folder: Path, quantize: Quantize) -> PreTrainedModel:
    model = spec.Model(path=str(folder), dtype="float32")
    return load_model(model, device=CPU, kernel=choose_kernel(CPU, torch.float32), quantize=quantize)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_cut_off_shard_is_named_before_anything_is_loaded(quantize: Quantize, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    big_model(folder, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2)
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{shard.name}: cut off or damaged.*finish the download"):
        load(folder, quantize)


def fuse_experts(folder: Path) -> None:
    """Stores the experts as one stack a layer, as some checkpoints do."""
    model = tiny.load_plain(folder)
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, folder / "model.safetensors")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_every_weight_is_the_one_that_transformers_would_load(kind: str, fused: bool, tmp_path: Path) -> None:
    folder = save_any(kind, tmp_path / "base")
    if fused:
        fuse_experts(folder)
    small, plain = load(folder, "nf4"), load(folder, "none")
    assert len(quantized_names(small)) >= 12
    for (name, weight), (same, wanted) in zip(small.named_parameters(), plain.named_parameters(), strict=True):
        assert name == same
        if isinstance(weight, QuantizedWeight):
            error = (weight.dense(torch.float32) - wanted).norm() / wanted.norm()
            assert error < 0.12, name  # 0.09 to 0.1 is what 4 bits cost a normal distribution
        else:
            assert torch.equal(weight, wanted), name
    for (name, buffer), (_, wanted) in zip(small.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, wanted), name
    assert small.generation_config.to_dict() == plain.generation_config.to_dict()


def save_any(kind: str, folder: Path, **changes: object) -> Path:
    if kind != "gpt_oss":
        return tiny.save_model(kind, folder, **changes)
    sizes = tiny.SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8} | changes
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GptOssConfig(**sizes), dtype=torch.float32).save_pretrained(folder)
    return folder


def save_mxfp4(folder: Path, dense_folder: Path) -> None:
    """Puts the experts of a gpt-oss folder in blocks of 4-bit codes, and what they then stand for beside it."""
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    generator = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, codes.shape[:3], dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes, scales
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        both = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], dim=-1).flatten(3)
        dense[name] = (both * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    dense_folder.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (dense_folder / "config.json").write_text(json.dumps(config))
    save_file(dense, dense_folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def test_mxfp4_experts_are_read_as_gpt_oss_is_published(tmp_path: Path) -> None:
    folder = save_any("gpt_oss", tmp_path / "base", hidden_size=64, intermediate_size=32)
    save_mxfp4(folder, tmp_path / "dense")
    wanted = dict(load(tmp_path / "dense", "none").named_parameters())
    for name, weight in load(folder, "none").named_parameters():
        assert torch.equal(weight, wanted[name]), name
    small, same = load(folder, "nf4"), dict(load(tmp_path / "dense", "nf4").named_parameters())
    for name, weight in small.named_parameters():
        other = same[name]
        if isinstance(weight, QuantizedWeight) and isinstance(other, QuantizedWeight):
            weight, other = weight.dense(torch.float32), other.dense(torch.float32)
        assert torch.equal(weight, other), name
    with pytest.raises(ModelError, match="holds mxfp4; set nf4"):
        load(folder, "fp8")


def test_the_text_model_of_a_larger_one_is_loaded(tmp_path: Path) -> None:
    text = AutoConfig.for_model("qwen3_5_moe_text", **SIZES | FAMILIES["qwen3_5_moe"].config)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    both = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision))
    both.float().save_pretrained(tmp_path)
    small, plain = load(tmp_path, "nf4"), dict(load(tmp_path, "none").named_parameters())
    assert len(quantized_names(small)) == 19
    for name, weight in small.named_parameters():
        if isinstance(weight, QuantizedWeight):
            assert (weight.dense(torch.float32) - plain[name]).norm() / plain[name].norm() < 0.12, name
        else:
            assert torch.equal(weight, plain[name]), name
