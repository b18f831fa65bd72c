"""What a result folder says of itself: where each thing came from, by hash and version; and files put in place."""

import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gatewright import __version__
from gatewright.data.tokenizer import load_tokenizer
from gatewright.export import llama
from gatewright.export.card import licence_of, modelfile, origin_of, training_figures
from gatewright.export.deltas import AdapterFiles
from gatewright.export.reference import load_reference
from gatewright.export.sample import SampleRequest
from gatewright.export.source import ExportSource
from gatewright.export.study import Sample
from gatewright.model.base_files import base_fingerprint

MANIFEST_VERSION = 1
PACKAGES = ("torch", "transformers", "peft", "gguf", "numpy", "safetensors")


def describe(
    source: ExportSource,
    adapter: AdapterFiles | None,
    identity: Mapping[str, Any],
    merging: Mapping[str, Any],
    *,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The manifest's first part: the base, the adapter, the run and the versions of everything that took part."""
    facts: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "name": source.name,
        "base": {
            "path": str(source.base),
            "origin": origin_of(source.base),
            "fingerprint": base_fingerprint(source.base),
            "licence": licence_of(source.base),
        },
        "versions": {
            "gatewright": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            "llama.cpp": llama.version(),
        },
        "merge": merging,
        "merged_dtype": str(dtype).removeprefix("torch."),
    }
    if adapter is not None:
        config = adapter.config
        facts["adapter"] = {
            "path": str(source.adapter),
            "files": identity["adapter"],
            "rank": config["r"],
            "alpha": config["lora_alpha"],
            "peft": config.get("peft_version"),
            "layout": "fused experts: A expert-major, B rank-major (PEFT since 0.19.1)",
        }
    if source.run is not None:
        facts["training"] = {"data": source.run.data.train, **training_figures(source.run_folder)}
    return facts


def data_read(request: SampleRequest, sample: Sample) -> dict[str, Any]:
    """Which documents the figures are of."""
    return {
        "calibration": {"source": str(request.train), "tokens": sum(map(len, sample.calibration))},
        "comparison": {
            "source": str(request.heldout or request.train),
            "held_out_of_training_data": request.heldout is None,
            "tokens": sum(map(len, sample.heldout)),
        },
    }


def ollama_file(out: Path, entry: Mapping[str, Any], *, base: Path, template: str | None, context_tokens: int) -> str:
    """The Modelfile of a file of the result; an adapter's quantised base is put beside it."""
    tokenizer = load_tokenizer(base)
    stops = tokenizer.convert_ids_to_tokens(load_reference(out / "reference.npz").ends)
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    model, adapter = entry["file"], None
    if level := entry["on_base"]:
        adapter = model
        model = publish(out, out / "work" / f"base-{level}.gguf", f"base-{level}", True).name
    return modelfile(model, adapter=adapter, chat_template=template or own, stops=stops, context_tokens=context_tokens)


def publish(out: Path, file: Path, stem: str, passed: bool) -> Path:
    """The file under its name in the result folder, as a second name of the same bytes where the disk can.

    A file that did not pass is called .failed.gguf, and one that is still being copied .unproven.gguf.
    """
    good, bad = out / f"{stem}.gguf", out / f"{stem}.failed.gguf"
    place, other = (good, bad) if passed else (bad, good)
    other.unlink(missing_ok=True)
    partial = out / f"{stem}.unproven.gguf"
    partial.unlink(missing_ok=True)
    try:
        os.link(file, partial)
    except OSError:
        shutil.copyfile(file, partial)
    os.replace(partial, place)
    return place
