"""llama.cpp's own converter, for architectures that we do not convert: found by its path, and run only if it is known.

It comes with llama.cpp's source, for instance in the source archive of llama-cpp-python, and needs `sentencepiece`.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gatewright.export.families import architecture_of
from gatewright.export.shards import PARTIAL
from gatewright.export.vocabulary import known_pre_tokenizer
from gatewright.spec.errors import ModelError, RunFailed, UserError

KNOWN: Mapping[str, str] = {
    "e949f8a00be0e6ce2795f172cefec5bb9e551e02bad87385e6a38796407cfced": "llama-cpp-python 0.3.36",
}
"""sha256 of the converter's sources -> where they are from."""
WITHOUT_DRAFT_LAYERS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""transformers does not keep the multi-token-prediction layers of these, and the converter must be told."""


def check_converter(script: Path, *, wanted: str | None) -> str:
    """The sha256 of the converter's sources. Raises UserError for one that is not known, nor `wanted` by its hash."""
    if not script.is_file():
        raise UserError(f"--converter: no file {script}; it is convert_hf_to_gguf.py in llama.cpp's source")
    digest = hashlib.sha256()
    root = script.parent
    files = [script, *sorted((root / "conversion").glob("*.py")), *sorted((root / "gguf-py" / "gguf").glob("*.py"))]
    for file in files:
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    found = digest.hexdigest()
    if found not in KNOWN and found != wanted:
        raise UserError(
            f"--converter: {script} and what it imports have the sha256 {found}, which is not one we know "
            f"({', '.join(KNOWN.values())}). It is code that will run here: read it, then add --converter-hash {found}"
        )
    return found


def convert_officially(script: Path, folder: Path, out: Path, *, precision: str) -> int:
    """Runs the converter on `folder`; returns the bytes of the file, which is there whole or not at all.

    Raises ModelError for what it is known to get wrong in silence; RunFailed with its last words when it fails.
    """
    _refuse_silent_faults(folder)
    partial = out.with_name(out.name + PARTIAL)
    process = [sys.executable, "-P", "-m", "gatewright.export.official_process", known_pre_tokenizer(folder) or ""]
    command = [*process, str(script), str(folder), "--outfile", str(partial), "--outtype", precision]
    if architecture_of(folder) in WITHOUT_DRAFT_LAYERS:
        command.append("--no-nextn")
    path = os.pathsep.join([str(script.parent / "gguf-py"), str(script.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode != 0 or not partial.is_file():
        partial.unlink(missing_ok=True)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RunFailed(f"{script.name} could not convert {folder}: {lines[-1] if lines else done.returncode}")
    os.replace(partial, out)
    return out.stat().st_size


def _refuse_silent_faults(folder: Path) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    if values.get("model_type") == "deepseek_v3" and "scoring_func" not in values:
        raise ModelError(
            f"{file}: no scoring_func, and the converter would take softmax where this model has sigmoid; add "
            '"scoring_func": "sigmoid"'
        )
