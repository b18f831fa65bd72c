"""quantization_config of a config.json → how the matrices are stored, in the words of planner/weights.FORMATS."""

from collections.abc import Mapping
from typing import Any

BY_METHOD = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
}
"""Methods that say it all by their name."""
BY_BITS = {4: "int4", 8: "int8"}
GROUP_METHODS = ("gptq", "awq", "gptqmodel")
"""Integers with a scale a group; their bits are a number of the config."""


def storage_format(settings: Mapping[str, Any]) -> str | None:
    """Key of weights.FORMATS; None for a method or a width whose bytes are not known here."""
    method = str(settings.get("quant_method", "")).lower()
    if method in BY_METHOD:
        return BY_METHOD[method]
    if method in GROUP_METHODS:
        return BY_BITS.get(_integer(settings.get("bits", settings.get("w_bit"))))
    if method == "bitsandbytes":
        if settings.get("load_in_4bit") is True:
            return "nf4-linears"
        return "int8" if settings.get("load_in_8bit") is True else None
    if method == "compressed-tensors":
        return _compressed(settings)
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(settings.get("quant_algo", "")).upper())
    return None


def _compressed(settings: Mapping[str, Any]) -> str | None:
    """One format for all groups of layers; None where they differ."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    found = {_of_weights(group) for group in groups.values()}
    return found.pop() if len(found) == 1 else None


def _of_weights(group: object) -> str | None:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    kinds = {("float", 8): "fp8", ("float", 4): "nvfp4", ("int", 8): "int8", ("int", 4): "int4"}
    return kinds.get((str(weights.get("type")), _integer(weights.get("num_bits"))))


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
