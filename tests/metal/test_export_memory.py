"""Merging and converting take the memory of a few matrices, whatever the model's size: measured in a child process."""

import json
import subprocess
import sys
from pathlib import Path

import export_models
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig

CHILD = """
import sys
from pathlib import Path
import torch
from gatewright.export.convert import convert
from gatewright.export.deltas import read_adapter
from gatewright.export.merge import empty_model, merge

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024

folder = Path(sys.argv[1])
model = empty_model(folder / "base")
adapter = read_adapter(folder / "adapter", model, base=folder / "base")
before = peak()
merge(folder / "base", adapter, model, folder / "merged", dtype=torch.float32, tick=lambda d, t: None)
merged = peak()
convert(folder / "merged", folder / "x.gguf", precision="f16", name="x", tick=lambda d, t: None)
print(before, merged, peak())
"""


def test_memory_is_bounded_by_matrices_not_by_the_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = MixtralConfig(
        **export_models.SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8},
        num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(base)
    export_models.save_tokenizer(base, "smollm")
    adapted = get_peft_model(model, LoraConfig(r=4, **export_models.EXPERTS_TOO))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(tmp_path / "adapter")
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True)
    before, merged, converted = map(int, done.stdout.split()[-3:])
    size = sum(file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors"))
    assert size > 400e6, "of what a merge in memory would hold"
    index = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert index["num_local_experts"] == 8
    assert merged - before < 80e6 and converted - before < 80e6
