"""Minimal configs of each tool, as a test changes them: a dictionary of keys becomes the file's text."""

import json
from typing import Any

File = tuple[str, str]
MOE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"


def yaml(name: str, keys: dict[str, Any]) -> File:
    """Values in JSON, which is YAML; None takes a key away."""
    return name, "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items() if value is not None)


def axolotl(**keys: Any) -> File:
    base: dict[str, Any] = {"base_model": DENSE, "sequence_len": 4096, "attn_implementation": "flash_attention_2"}
    return yaml("axolotl.yaml", base | {"output_dir": "outputs/run"} | keys)


def factory(**keys: Any) -> File:
    base: dict[str, Any] = {"model_name_or_path": DENSE, "stage": "sft", "finetuning_type": "lora", "template": "qwen3"}
    return yaml("factory.yaml", base | {"cutoff_len": 4096, "output_dir": "saves/run"} | keys)


def trl(**keys: Any) -> File:
    base: dict[str, Any] = {"model_name_or_path": DENSE, "dataset_name": "rows", "output_dir": "outputs/run"}
    return yaml("trl.yaml", base | keys)


def trainer(**keys: Any) -> File:
    base: dict[str, Any] = {"model_name_or_path": DENSE, "output_dir": "outputs/run"}
    return yaml("trainer.yaml", base | keys)


def ours(**sections: dict[str, Any]) -> File:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": MOE},
        "data": {"train": "rows.jsonl", "max_tokens": 4096},
        "train": {"tokens_per_step": 131072, "steps": 1000, "lr": 1e-4, "checkpointing": "full"},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}}
    return yaml("run.yaml", {"run": "judge", **merged})


def deepspeed(stage: int = 2, **keys: Any) -> File:
    zero = {"stage": stage} | keys.pop("zero", {})
    return "ds.json", json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}} | keys, indent=2) + "\n"


def accelerate(**keys: Any) -> File:
    return yaml("accelerate.yaml", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"} | keys)


def megatron(options: str, *, env: str = "") -> File:
    return "megatron.sh", f"#!/bin/bash\n{env}\npython pretrain_gpt.py --micro-batch-size 1 {options}\n"


def swift(options: str, *, verb: str = "sft") -> File:
    return "swift.sh", f"#!/bin/bash\nswift {verb} --model {DENSE} {options}\n"


def megatron_swift(options: str, *, model: str = MOE, head: str = "") -> File:
    return "swift.sh", f"#!/bin/bash\n{head}\nmegatron sft --model {model} {options}\n"


def sbatch(directives: str, *lines: str) -> File:
    """`--nodes=2 --time=24:00:00` as #SBATCH lines, then the script."""
    head = "".join(f"#SBATCH {word}\n" for word in directives.split())
    return "job.sbatch", f"#!/bin/bash\n{head}" + "".join(f"{line}\n" for line in lines)
