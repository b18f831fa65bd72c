"""The planner's bytes of a model that answers, against what llama.cpp says it takes."""

import re
from pathlib import Path

import export_models
import llama_cpp
import pytest
from transformers import Qwen3MoeConfig

from gatewright.export.convert import convert
from gatewright.export.llama import captured_log
from gatewright.planner.architecture import read_shape
from gatewright.planner.serving import serving_memory

MIB = 2**20


def told(file: Path, context_tokens: int) -> dict[str, float]:
    """MiB of each kind of buffer, from llama.cpp's log."""
    said: list[str] = []
    with captured_log(said.append):
        llama_cpp.Llama(str(file), n_ctx=context_tokens, n_batch=512, n_threads=1).close()
    log = "".join(said)
    kinds = {"cache": r"CPU KV buffer size", "work": r"sched_reserve: +CPU compute buffer size"}
    return {kind: sum(map(float, re.findall(rf"{words} = +([\d.]+) MiB", log))) for kind, words in kinds.items()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("context_tokens", [512, 4096])
@pytest.mark.filterwarnings("ignore")
def test_cache_and_work_are_what_llama_says(tmp_path: Path, kind: str, context_tokens: int) -> None:
    base = export_models.save_base(kind, tmp_path / "base")
    convert(base, tmp_path / "x.gguf", precision="f16", name="x", tick=lambda done, total: None)
    planned = serving_memory(read_shape(base), weights_bytes=7, context_tokens=context_tokens)
    found = told(tmp_path / "x.gguf", context_tokens)
    assert planned.cache_bytes / MIB == pytest.approx(found["cache"], abs=0.01)
    assert planned.work_bytes / MIB == pytest.approx(found["work"], rel=0.25)
    assert planned.bytes == 7 + planned.cache_bytes + planned.work_bytes


def test_a_wide_vocabulary_needs_its_logits(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**export_models.SIZES | {"vocab_size": 151_936}, **export_models.ROUTED)
    shape = read_shape(config.to_dict())
    planned = serving_memory(shape, weights_bytes=0, context_tokens=512)
    assert planned.work_bytes == 4 * 512 * (151_936 + 256)
