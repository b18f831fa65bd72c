"""Quantisation by llama.cpp's own library: a GGUF file in 16 or 32 bits into one with fewer.

The result is written under another name and renamed when it is whole. Rows that a type's blocks do not fit are stored
in a larger type by llama.cpp; how many is counted, since it decides how small the file really is.
"""

import ctypes
import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from gatewright.export.llama import captured_log
from gatewright.export.shards import PARTIAL
from gatewright.spec.errors import RunFailed, UserError

EXACT = ("f32", "f16", "bf16")
"""Written by the converter itself."""
LEVELS: Mapping[str, int] = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q5_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "iq4_xs": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "iq4_nl": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "q3_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_M,
}
TYPES: Mapping[str, int] = {
    "f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q6_k": llama_cpp.GGML_TYPE_Q6_K, "q5_k": llama_cpp.GGML_TYPE_Q5_K, "q4_k": llama_cpp.GGML_TYPE_Q4_K,
    "q3_k": llama_cpp.GGML_TYPE_Q3_K, "iq4_xs": llama_cpp.GGML_TYPE_IQ4_XS, "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0, "q5_0": llama_cpp.GGML_TYPE_Q5_0,
}  # fmt: skip
"""Types of single tensors, for recipes."""
BUFFER_BYTES = 1 << 30
"""Rows of a tensor that llama.cpp keeps in memory at one time."""

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is quantised: a level, and tensors that get another type."""

    level: str
    overrides: tuple[tuple[str, str], ...] = ()
    """(regular expression over GGUF's tensor names, type)."""

    @property
    def converted(self) -> bool:
        """Whether the converter writes it, without a quantiser."""
        return self.level in EXACT

    @property
    def exact(self) -> bool:
        """Whether the file must be the model: 8 bits of mantissa, as in bf16, are too few for that."""
        return self.level in ("f32", "f16")

    @property
    def label(self) -> str:
        """Name in file names, such as Q4_K_M, or Q4_K_M-ffn_down_exps=q6_k."""
        parts = [f"{pattern}={kind}" for pattern, kind in self.overrides]
        return re.sub(r"[^\w.=-]+", "_", "-".join([self.level.upper(), *parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    bytes: int
    fallbacks: dict[str, int]
    """Type that was taken instead of the wanted one -> tensors."""
    tensors: int


def parse_recipes(text: str) -> list[Recipe]:
    """`f16,q4_k_m,q4_k_m:ffn_down_exps=q6_k:attn=q8_0`: levels, each with overrides. Raises UserError."""
    recipes = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        level, *rules = word.split(":")
        level = level.lower()
        if level not in (*EXACT, *LEVELS):
            near = difflib.get_close_matches(level, (*EXACT, *LEVELS), n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--quant: {level!r} is no level{hint} Known: {', '.join((*EXACT, *LEVELS))}")
        if rules and level in EXACT:
            raise UserError(f"--quant: {word}: tensors get another type in a quantised file only, not in {level}")
        recipes.append(Recipe(level=level, overrides=tuple(_rule(rule, word) for rule in rules)))
    if not recipes:
        raise UserError(f"--quant is empty; known: {', '.join((*EXACT, *LEVELS))}")
    return list(dict.fromkeys(recipes))


def quantise(
    source: Path,
    out: Path,
    recipe: Recipe,
    *,
    importance: Mapping[str, F32],
    tick: Callable[[int, int], None],
    threads: int | None = None,
) -> Quantised:
    """Writes `source` (F16 or F32) as `out` by the recipe. `tick(done, total)` is told of tensors.

    `importance` holds, by GGUF's tensor name, the mean square of each input channel, one row an expert; it may be
    empty. Raises RunFailed with llama.cpp's own words when it cannot finish; what was there before stays.
    """
    keep: list[object] = []
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = LEVELS[recipe.level]
    params.nthread = threads or len(os.sched_getaffinity(0))
    params.max_buf_size = BUFFER_BYTES
    if importance:
        params.imatrix = _importance_array(importance, keep)
    if recipe.overrides:
        params.tt_overrides = _override_array(recipe.overrides, keep)
    said: list[str] = []
    partial = out.with_name(out.name + PARTIAL)

    def listen(text: str) -> None:
        said.append(text)
        if found := re.match(r"\[\s*(\d+)/\s*(\d+)\]", text):
            tick(int(found[1]), int(found[2]))

    with captured_log(listen):
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params))
    log = "".join(said)
    if code != 0 or not partial.is_file():
        partial.unlink(missing_ok=True)
        lines = [line for line in log.splitlines() if "fail" in line.lower() or "error" in line.lower()]
        raise RunFailed(
            f"{out}: llama.cpp could not quantise to {recipe.label}: {' '.join(lines[-2:]) or f'code {code}'} "
            "Is the disk full? Earlier results are kept; run the command again to go on"
        )
    _flush(partial)
    os.replace(partial, out)
    fallbacks = Counter(name.strip() for name in re.findall(r"falling back to\s+(\S+)", log))
    counts = re.findall(r"\[\s*\d+/\s*(\d+)\]", log)
    return Quantised(bytes=out.stat().st_size, fallbacks=dict(fallbacks), tensors=int(counts[-1]) if counts else 0)


def _rule(rule: str, word: str) -> tuple[str, str]:
    pattern, equals, kind = rule.rpartition("=")
    kind = kind.lower()
    if not equals or not pattern or kind not in TYPES:
        near = difflib.get_close_matches(kind, TYPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--quant: {word}: wanted :PATTERN=TYPE with one of {', '.join(TYPES)}, got {rule!r}{hint}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"--quant: {word}: {pattern!r} is no regular expression: {error}") from None
    return pattern, kind


def _importance_array(
    importance: Mapping[str, F32], keep: list[object]
) -> "ctypes.Array[llama_cpp.llama_model_imatrix_data]":
    array = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(array, importance.items(), strict=False):
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        keep += [flat, entry]
        entry.name = name.encode()
        entry.data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = flat.size
    keep.append(array)
    return array


def _override_array(
    overrides: Sequence[tuple[str, str]], keep: list[object]
) -> "ctypes.Array[llama_cpp.llama_model_tensor_override]":
    array = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
    for entry, (pattern, kind) in zip(array, overrides, strict=False):
        entry.pattern = pattern.encode()
        entry.type = TYPES[kind]
    keep.append(array)
    return array


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
