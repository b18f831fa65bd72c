"""The planner's bytes of a frozen base against the bytes that a load leaves in memory: within 1 %."""

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SIZES
from fp8_made import save_fp8
from transformers import AutoConfig, AutoModelForCausalLM

from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.model.quantized import quantized_names, weight_bytes
from gatewright.model.quantized_load import Quantize
from gatewright.planner.memory import estimate_memory
from gatewright.planner.plan_run import ask_run
from gatewright.spec import run as spec
from gatewright.spec.errors import RunFileError

CPU = torch.device("cpu")
LARGER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "head_dim": 64,
    "vocab_size": 512,
}
"""So that what every tensor costs beside its codes (a mean, a last incomplete block of scales) does not count."""


def save_larger(name: str, folder: Path) -> Path:
    family = FAMILIES[name]
    sizes = {**SIZES, **family.config}
    sizes |= {key: value for key, value in LARGER.items() if key in sizes and sizes[key] is not None}
    config = AutoConfig.for_model(family.model_type or name, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def run_of(folder: Path, storage: Quantize) -> spec.Run:
    return spec.Run.model_validate(
        {
            "run": "planned",
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "method": {"adapter": {"rank": 8, "targets": ["attention"]}, "quantize": storage},
            "data": {"train": "none.jsonl"},
            "train": {"tokens_per_step": 4096, "steps": 1, "lr": 1e-3},
            "hardware": {"gpu": "h200", "per_node": 1},
        }
    )


def planned_and_held(folder: Path, storage: Quantize) -> tuple[float, int]:
    kernel = choose_kernel(CPU, torch.bfloat16)
    model = load_model(spec.Model(path=str(folder)), device=CPU, kernel=kernel, quantize=storage)
    assert bool(quantized_names(model)) == (storage != "none")
    question = ask_run(run_of(folder, storage))
    parts = estimate_memory(question.job).phases[0].parts
    [frozen] = [part for part in parts if part.name == "frozen weights"]
    return frozen.bytes, weight_bytes(model)


FEW_LARGE = [
    "llama", "qwen3_moe", "mixtral", "qwen3_5_moe", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "gpt_oss",
    "granitemoe",
]  # fmt: skip


@pytest.mark.parametrize("name", FEW_LARGE)
def test_nf4_takes_the_planned_bytes(name: str, tmp_path: Path) -> None:
    planned, held = planned_and_held(save_larger(name, tmp_path / "base"), "nf4")
    assert planned == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("storage", ["none", "fp8", "nf4"])
def test_an_fp8_checkpoint_takes_the_planned_bytes(storage: Quantize, tmp_path: Path) -> None:
    folder = save_fp8(save_larger("qwen3_moe", tmp_path / "base"), tmp_path / "fp8", block=(128, 128))
    planned, held = planned_and_held(folder, storage)
    assert planned == pytest.approx(held, rel=0.01)


def test_a_plan_refuses_what_the_trainer_would(tmp_path: Path) -> None:
    folder = save_larger("qwen3_moe", tmp_path / "base")
    with pytest.raises(RunFileError, match="holds plain floats; set nf4 or none"):
        ask_run(run_of(folder, "fp8"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(RunFileError, match=r"quantised already \(gptq\)"):
        ask_run(run_of(folder, "nf4"))


def test_nf4_is_planned_as_qlora(tmp_path: Path) -> None:
    folder = save_larger("qwen3_moe", tmp_path / "base")
    job = ask_run(run_of(folder, "nf4")).job
    assert (job.method, job.storage) == ("qlora", "nf4")
