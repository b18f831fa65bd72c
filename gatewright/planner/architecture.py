"""Any Hugging Face config.json → ModelShape: finds the text model's settings, then its family's builder."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gatewright.planner.architecture_config import Config, read_json
from gatewright.planner.architecture_families import ALIASES, FAMILIES
from gatewright.planner.quantization_config import storage_format
from gatewright.spec.errors import ModelError
from gatewright.spec.shape import ModelShape

NESTED = ("text_config", "language_config", "llm_config")
"""Where configs of image, audio and video models keep their language model."""
NEVER_TIED = ("kimi_linear", "nemotron_h")
"""Families whose head transformers keeps apart whatever the config says."""
OTHER_PARTS = ("vision_config", "audio_config", "talker_config", "code2wav_config")


def read_shape(source: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelShape:
    """Layers, tensors by role and linear modules of a model, from its config alone; no weights are read.

    `source` is a folder with config.json, a config.json, or its content. Counts are those of the text model that
    transformers 5.24 builds with AutoModelForCausalLM; MTP layers are listed beside it, under the role `mtp`.
    Raises ModelError for a file that is no config, is cut off or holds impossible numbers, and for a family that
    is not known.
    """
    values, where = load_values(source)
    text, family = text_model(values, where=where)
    config = Config(text, family=family, where=where)
    quantization = text.get("quantization_config") or values.get("quantization_config")
    quantization = quantization if isinstance(quantization, Mapping) else None
    shape = ModelShape(
        name=name or model_name(source, family=family),
        family=family,
        hidden=config.hidden,
        vocab=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings") and family not in NEVER_TIED,
        layers=(),
        groups=(),
        dtype=stored_dtype(text, values),
        quantization=None if quantization is None else str(quantization.get("quant_method"))[:40],
        storage=None if quantization is None else storage_format(quantization),
        max_tokens=config.optional_size("max_position_embeddings"),
        left_out=tuple(part for part in OTHER_PARTS if values.get(part)),
    )
    built = FAMILIES[family](config, shape)
    assumed = tuple(f"{key}={value}" for key, value in config.assumed.items() if type(value) is int)
    return replace(built, assumed=assumed)


def load_values(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The config's content, and what error messages call it."""
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"{path.parent} holds no config.json. Point at the folder of a Hugging Face model.")
    return read_json(path), str(path)


def model_name(source: str | Path | Mapping[str, Any], *, family: str) -> str:
    if isinstance(source, Mapping):
        return family
    path = Path(source).resolve()
    return path.name if path.is_dir() else path.parent.name


def text_model(values: Mapping[str, Any], *, where: str) -> tuple[Mapping[str, Any], str]:
    """Settings of the language model, and its family; what the outer config alone says is taken over."""
    nested = next((values[key] for key in NESTED if isinstance(values.get(key), dict)), None)
    outer = values.get("model_type")
    if nested is not None and "hidden_size" not in values:
        inner = nested.get("model_type") or (f"{outer}_text" if isinstance(outer, str) else None)
        text = {"tie_word_embeddings": values["tie_word_embeddings"]} if "tie_word_embeddings" in values else {}
        return with_depth({**text, **nested}), known_family(inner, where=where)
    return with_depth(values), known_family(outer, where=where)


def with_depth(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nemotron-H configs may give the number of layers only as the length of their pattern."""
    pattern = values.get("layers_block_type") or values.get("hybrid_override_pattern")
    if values.get("num_hidden_layers") is None and isinstance(pattern, list | str) and pattern:
        return {**values, "num_hidden_layers": len(pattern)}
    return values


def known_family(model_type: object, *, where: str) -> str:
    """The family behind a model_type. Raises ModelError that names the nearest one known."""
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{where} has no model_type: it is not a Hugging Face config. Point at the model's own file.")
    for candidate in (model_type, f"{model_type}_text"):
        family = ALIASES.get(candidate, candidate)
        if family in FAMILIES:
            return family
    near = difflib.get_close_matches(model_type, [*FAMILIES, *ALIASES], n=3, cutoff=0.5)
    nearest = f"nearest known: {', '.join(near)}" if near else f"known: {', '.join(sorted(FAMILIES))}"
    raise ModelError(
        f"{where}: model_type {model_type[:60]!r} is not a family with exact formulas ({nearest}). "
        "Add --simulate to build it with transformers on fake tensors instead."
    )


def stored_dtype(*configs: Mapping[str, Any]) -> str:
    """`dtype` or its older name, of the inner config before the outer one; bfloat16 where none says."""
    for config in configs:
        for key in ("dtype", "torch_dtype"):
            if isinstance(config.get(key), str):
                return str(config[key])
    return "bfloat16"
