"""Families over ranks: experts divided, and everything sharded, give one process's loss, gradients and counts."""

from pathlib import Path

import families
import pytest
import tiny
from test_parity import demand_equality

from gatewright.spec.run import Run

NAMES = ["mixtral", "olmoe", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "deepseek_v4", "glm4_moe", "glm_moe_dsa"]
NAMES += ["gpt_oss", "granitemoe", "minimax", "kimi_linear", "llama4", "afmoe"]
FULL = {"parallel__ep": 2, "parallel__dense": "zero3", "method__adapter": None}
LAYOUTS = {"lora": {"parallel__ep": 2}, "lora-zero3": {"parallel__dense": "zero3"}, "full": FULL}


def make(folder: Path, name: str, what: str) -> Run:
    base = folder / f"base-{name}"
    if not base.exists():
        families.save_family(name, base, vocab_size=272)
        tiny.save_tokenizer(base)
        tiny.save_rows(folder / "train.jsonl", 30)
    targets = {"method__adapter__targets": list(families.FAMILIES[name].targets)} if "lora" in what else {}
    return tiny.make_run(folder, name, run=f"{name}-{what}", train__lr=1e-3, **LAYOUTS[what] | targets)


@pytest.mark.parametrize("what", LAYOUTS)
def test_families_on_two_ranks_equal_one(tmp_path: Path, what: str) -> None:
    runs = {name: make(tmp_path, name, what) for name in NAMES}
    demand_equality(runs, tmp_path, size=2, steps=1, weights=None)
