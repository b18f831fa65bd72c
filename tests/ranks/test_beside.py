"""What trains in full beside an adapter under zero3: kept in float32, divided with the rest, saved like any."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from whole_runs import finish

from gatewright.spec.run import Run


def make(folder: Path, name: str, dense: str, dtype: str) -> Run:
    return tiny.make_run(
        folder, "qwen3_moe", run=name, model__dtype=dtype, train__micro_batch_tokens=100,
        method__adapter__full=["router", "norm", "head"], parallel__dense=dense,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_zero3_trains_and_saves_it_as_replicated_ranks_do(tmp_path: Path, dtype: str, error: float) -> None:
    saved = {}
    for dense in ("replicate", "zero3"):
        run = make(tmp_path, f"{dense}-{dtype}", dense, dtype)
        finish(run, 2)
        saved[dense] = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    assert saved["zero3"].keys() == saved["replicate"].keys()
    assert sum("norm" in name or "lm_head" in name or "gate.weight" in name for name in saved["zero3"]) >= 6
    for name, tensor in saved["replicate"].items():
        assert tensor.dtype == saved["zero3"][name].dtype == torch.float32, name
        difference = (saved["zero3"][name] - tensor).norm() / tensor.norm().clamp(min=1e-12)
        assert difference <= error, f"{name}: {difference:.1e}"
