"""The verdict on one GGUF file by the reference that an export left, with nothing but numpy and llama.cpp."""

import json
import re
from pathlib import Path
from typing import Any

from gatewright.export.measure import Figures, Gate, gates, measure
from gatewright.export.reference import load_reference
from gatewright.export.steps import file_sha256
from gatewright.spec.errors import ModelError


def judge(file: Path, against: Path, *, threads: int | None, adapter: Path | None = None) -> dict[str, Any]:
    """Figures, gates and verdict of a file. Raises ModelError for a folder that is no result of an export."""
    manifest_file = against / "manifest.json"
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        entries: list[dict[str, Any]] = manifest["files"]
    except FileNotFoundError:
        raise ModelError(f"{manifest_file}: not there; give the folder that `gatewright export` wrote") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"{manifest_file}: damaged ({error}); copy it again") from None
    figures = measure(file, load_reference(against / "reference.npz"), threads=threads, adapter=adapter)
    entry = _entry_of(file, entries)
    if entry is None:
        raise ModelError(
            f"{manifest_file}: knows no file like {file.name}, so there is nothing to hold it to; it knows "
            f"{', '.join(str(entry['file']) for entry in entries)}"
        )
    # Without a base, what the file lost when it was exported is what it may lose here.
    judged = gates(figures, exact=entry["exact"], base=Figures(**(entry["base_figures"] or entry["figures"])))
    if file.name == entry["file"] and adapter is None:
        judged.append(Gate("bytes other than those exported (sha256)", int(file_sha256(file) != entry["sha256"]), 0))
    # What only the export could see, of the conversion and of each weight.
    found = [*entry["gates"][: entry["making_gates"]], *(gate.as_dict() for gate in judged)]
    return {
        "file": str(file),
        "as": entry["recipe"],
        "passed": all(gate["passed"] for gate in found),
        "gates": found,
        "figures": figures.as_dict(),
    }


def _entry_of(file: Path, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry of that name, or of the recipe that the name ends with: a renamed file, or the base of an adapter."""
    stem = re.sub(r"(\.failed|\.unproven)?\.gguf$", "", file.name)
    for entry in entries:
        if re.sub(r"(\.failed)?\.gguf$", "", str(entry["file"])) == stem:
            return entry
    return max(
        (entry for entry in entries if stem.upper().endswith(str(entry["recipe"]).upper())),
        key=lambda entry: len(str(entry["recipe"])),
        default=None,
    )
