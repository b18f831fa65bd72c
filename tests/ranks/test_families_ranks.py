"""Families over ranks: experts divided, and everything sharded, give one process's loss, gradients and counts."""

from pathlib import Path

import families
import pytest
import tiny
from processes import free_ports, on_ranks
from steps import alone
from test_parity import differences, take_all

from gatewright.spec.run import Run

NAMES = ["mixtral", "olmoe", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "deepseek_v4", "glm4_moe", "glm_moe_dsa"]
NAMES += ["gpt_oss", "granitemoe", "minimax", "kimi_linear", "llama4", "afmoe"]
FULL = {"parallel__ep": 2, "parallel__dense": "zero3", "method__adapter": None}
LAYOUTS = {"lora": {"parallel__ep": 2}, "full": FULL}


def make(folder: Path, name: str, what: str) -> Run:
    base = folder / f"base-{name}"
    if not base.exists():
        families.save_family(name, base, vocab_size=272)
        tiny.save_tokenizer(base)
        tiny.save_rows(folder / "train.jsonl", 30)
    targets = {"method__adapter__targets": list(families.FAMILIES[name].targets)} if what == "lora" else {}
    return tiny.make_run(folder, name, run=f"{name}-{what}", train__lr=1e-3, **LAYOUTS[what] | targets)


@pytest.mark.parametrize("what", LAYOUTS)
def test_families_on_two_ranks_equal_one(tmp_path: Path, what: str) -> None:
    runs = {name: make(tmp_path, name, what) for name in NAMES}
    one = {name: alone(run, steps=1) for name, run in runs.items()}
    many = on_ranks(2, tmp_path / "ranks", take_all, runs, free_ports(len(runs)), 1, patience_s=300)
    faults = []
    for name in runs:
        faults += [f"{name}: {fault}" for fault in differences(one[name], [part[name] for part in many], weights=False)]
    assert not faults, "\n".join(faults)
