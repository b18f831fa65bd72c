"""Folders of weights: each fault of a checkpoint, an adapter or a model is found, and a sound one is not blamed."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from preflight_case import codes
from preflight_texts import DENSE, MOE, axolotl

from gatewright.preflight.check import Verdict, check
from gatewright.preflight.gather import Given
from gatewright.preflight.output import render_text

SIZES = {"F32": 4, "BF16": 2, "F16": 2}
ATTENTION = "base_model.model.model.layers.0.self_attn"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def safetensors(tensors: dict[str, tuple[str, list[int]]], *, zero: bool = False) -> bytes:
    """A safetensors file of ones, or of zeros."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + (b"\0" if zero else b"\1") * at


@dataclass
class Parts:
    """Files of a folder by name, changed by a test before they are written."""

    files: dict[str, bytes] = field(default_factory=dict)
    config: str = ""
    """A config.yaml judged together with the folder."""

    def json(self, name: str, value: object) -> "Parts":
        self.files[name] = json.dumps(value).encode()
        return self


def model(**config: Any) -> Parts:
    parts = Parts()
    parts.json("config.json", {"model_type": "llama", "vocab_size": 10} | config)
    parts.json("tokenizer_config.json", {"chat_template": "{{ messages }}"})
    parts.json("tokenizer.json", {"model": {"vocab": {str(n): n for n in range(10)}}, "added_tokens": []})
    parts.json(
        "model.safetensors.index.json",
        {"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}},
    )
    parts.files["model-1.safetensors"] = safetensors({"a.weight": ("BF16", [2, 2])})
    parts.files["model-2.safetensors"] = safetensors({"b.weight": ("BF16", [2, 2])})
    return parts


def adapter(tensors: dict[str, tuple[str, list[int]]] | None = None, *, base: str = DENSE, zero: bool = False) -> Parts:
    parts = Parts().json("adapter_config.json", {"r": 4, "base_model_name_or_path": base, "peft_type": "LORA"})
    held = tensors or {
        f"{ATTENTION}.q_proj.lora_A.weight": ("F32", [4, 8]),
        f"{ATTENTION}.q_proj.lora_B.weight": ("F32", [8, 4]),
    }
    parts.files["adapter_model.safetensors"] = safetensors(held, zero=zero)
    return parts


def checkpoint(ranks: int = 4) -> Parts:
    parts = adapter().json("trainer_state.json", {"global_step": 100})
    parts.files |= {f"rng_state_{rank}.pth": b"x" for rank in range(ranks)} | {"optimizer.pt": b"x"}
    return parts


def without(parts: Parts, name: str) -> Parts:
    del parts.files[name]
    return parts


def replaced(parts: Parts, name: str, raw: bytes) -> Parts:
    parts.files[name] = raw
    return parts


def expert_adapter(experts: int) -> Parts:
    return adapter({f"{EXPERTS}.{n}.up_proj.lora_A.weight": ("F32", [4, 8]) for n in range(experts)}, base=MOE)


def on_deepspeed(parts: Parts) -> Parts:
    parts.files["global_step100.json"] = b"{}"
    return parts


Made = Callable[[], Parts]
CASES: tuple[tuple[str, Made, Made], ...] = (
    ("GW901", lambda: without(model(), "model-2.safetensors"), model),
    (
        "GW902",
        lambda: replaced(model(), "model-2.safetensors", safetensors({"b.weight": ("BF16", [2, 2])})[:-3]),
        model,
    ),
    ("GW903", lambda: replaced(model(), "model-2.safetensors", safetensors({"c.weight": ("BF16", [2, 2])})), model),
    ("GW904", lambda: replaced(model(), "model-2.safetensors", safetensors({"b.weight": ("F32", [2, 2])})), model),
    ("GW905", lambda: adapter({f"{ATTENTION}.query_key_value.lora_A.weight": ("F32", [4, 8])}), adapter),
    (
        "GW906",
        lambda: adapter({"base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight": ("F32", [4, 8])}),
        adapter,
    ),
    ("GW907", lambda: expert_adapter(16), lambda: expert_adapter(128)),
    ("GW908", lambda: adapter({f"{ATTENTION}.q_proj.lora_A.weight": ("F32", [2, 8])}), adapter),
    ("GW909", lambda: adapter(zero=True), adapter),
    ("GW910", lambda: without(checkpoint(), "rng_state_2.pth"), checkpoint),
    ("GW911", lambda: without(checkpoint(), "optimizer.pt"), checkpoint),
    ("GW912", lambda: replaced(checkpoint(), "checkpoint-is-incomplete.txt", b""), checkpoint),
    ("GW913", lambda: on_deepspeed(checkpoint(4)), lambda: on_deepspeed(checkpoint(8))),
    ("GW914", lambda: model(vocab_size=9), model),
    ("GW915", lambda: model().json("tokenizer_config.json", {"model_max_length": 4096}), model),
    ("GW916", lambda: replaced(without(adapter(), "adapter_model.safetensors"), "adapter_model.bin", b"x"), adapter),
    (
        "GW917",
        lambda: model(model_type="qwen3_moe", norm_topk_prob=False),
        lambda: model(model_type="qwen3_moe", norm_topk_prob=True),
    ),
    ("GW918", lambda: model(model_type="deepseek_v3"), lambda: model(model_type="deepseek_v3", scoring_func="sigmoid")),
)


def judged(parts: Parts, folder: Path) -> Verdict:
    folder.mkdir()
    for name, raw in parts.files.items():
        (folder / name).write_bytes(raw)
    return check([folder], given=Given(gpus=8))


@pytest.mark.parametrize(("code", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_finds_the_folder_that_breaks_it_and_only_that(code: str, bad: Made, good: Made, tmp_path: Path) -> None:
    found = judged(bad(), tmp_path / "bad")
    assert code in codes(found)
    assert str(found.findings[0].places[0]).startswith(str(tmp_path / "bad"))
    assert code not in codes(judged(good(), tmp_path / "good"))
    assert code in render_text(found)


def test_a_sound_model_adapter_and_checkpoint_have_no_findings(tmp_path: Path) -> None:
    assert codes(judged(model(), tmp_path / "model")) == []
    assert codes(judged(adapter(), tmp_path / "adapter")) == []
    assert codes(judged(checkpoint(8), tmp_path / "checkpoint")) == []


def test_an_adapter_is_judged_against_the_model_of_the_config_beside_it(tmp_path: Path) -> None:
    judged(adapter({f"{ATTENTION}.q_proj.lora_A.weight": ("F32", [4, 8])}, base="unknown/model"), tmp_path / "adapter")
    name, text = axolotl(base_model="EleutherAI/none")
    (tmp_path / name).write_text(text)
    assert "GW905" not in codes(check([tmp_path / "adapter", tmp_path / name]))


def test_a_folder_of_many_files_is_read_in_bounded_time(tmp_path: Path) -> None:
    parts = model()
    parts.files |= {f"shard-{number}.txt": b"" for number in range(21_000)}
    assert "GW901" not in codes(judged(parts, tmp_path / "many"))


def test_damaged_json_in_a_folder_is_a_finding(tmp_path: Path) -> None:
    for name in ("config.json", "adapter_config.json", "tokenizer.json", "model.safetensors.index.json"):
        found = judged(replaced(model(), name, b'{"a": ' + b"[" * 10_000), tmp_path / name)
        assert "GW902" in codes(found)
