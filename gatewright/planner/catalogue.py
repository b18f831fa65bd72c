"""The catalogue: models and GPUs by name, letter case and organisation aside."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gatewright.planner.architecture import read_shape
from gatewright.spec.errors import ModelError, UserError
from gatewright.spec.hardware import GIB, Gpu, Price
from gatewright.spec.shape import ModelShape

CATALOG = Path(__file__).parent.parent / "catalog"
DEVICE_TOLERANCE = 0.03
"""Drivers differ in what they keep of a device's memory for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the catalogue."""

    name: str
    hub: str
    """organisation/name on the hub it was published on; nothing is fetched from there."""
    also: tuple[str, ...]
    """Other published models of the same shape."""
    source: str
    """Where the config's values come from."""
    published_parameters: int
    """As its makers count them."""
    within: float
    """Rounding of that number: 0 where it is exact."""
    counts_mtp: bool
    """The published number counts MTP layers."""
    besides: Mapping[str, int]
    """What the published number counts and this planner does not: buffers, a vision tower."""
    config: Mapping[str, Any]

    def shape(self) -> ModelShape:
        return read_shape(self.config, name=self.name)

    def counted(self, shape: ModelShape) -> int:
        """Our count of what the published number counts."""
        own = shape.checkpoint_parameters if self.counts_mtp else shape.parameters
        return own + sum(self.besides.values())


def models() -> list[Entry]:
    """Every model of the catalogue, by name."""
    return [entry(path) for path in sorted(CATALOG.glob("models/*.json"), key=lambda path: path.name.lower())]


def entry(path: Path) -> Entry:
    document = json.loads(path.read_bytes())
    published = document["published"]
    return Entry(
        name=document["name"],
        hub=document["hub"],
        also=tuple(document["also"]),
        source=document["source"],
        published_parameters=published["parameters"],
        within=published["within"],
        counts_mtp=published["counts"] == "checkpoint",
        besides=published.get("besides", {}),
        config=document["config"],
    )


def find_shape(model: str) -> ModelShape:
    """Shape of a folder, a config.json or a catalogue name, in this order; letter case and organisation do not matter.

    Raises ModelError that names the nearest catalogue entries.
    """
    path = Path(model)
    if path.exists():
        return read_shape(path)
    return find_model(model).shape()


def find_model(name: str) -> Entry:
    """The catalogue's entry of this name, hub name or alias."""
    direct = CATALOG / "models" / f"{Path(name).name}.json"
    wanted = name.lower()
    if direct.is_file() and wanted in (entry(direct).name.lower(), entry(direct).hub.lower()):
        return entry(direct)
    known: dict[str, str] = {}
    for item in models():
        organisation = item.hub.split("/")[0]
        for alias in (item.name, item.hub.split("/")[1], *item.also):
            known[alias.lower()] = known[f"{organisation}/{alias}".lower()] = alias
        if wanted in known:
            return item
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
    nearest = ", ".join(dict.fromkeys(known[match] for match in near)) or "none"
    raise ModelError(
        f"No model, folder or config.json is called {name[:80]!r}. Nearest in the catalogue: {nearest}. "
        "See `gatewright models`, or give the path of a config.json."
    )


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, newest first within a maker."""
    return tuple(gpu(row) for row in json.loads((CATALOG / "gpus.json").read_bytes())["gpus"])


def gpu(row: Mapping[str, Any]) -> Gpu:
    """Catalogue units (GiB, TB/s, TFLOP/s, GB/s) to bytes and FLOP a second."""
    fp8 = row["fp8_tflops"]
    return Gpu(
        name=row["name"],
        title=row["title"],
        vendor=row["vendor"],
        architecture=row["architecture"],
        memory_bytes=round(row["memory_gib"] * GIB),
        memory_source=row["memory_source"],
        bandwidth_bytes_per_s=row["bandwidth_tb_per_s"] * 1e12,
        bf16_flops_per_s=row["bf16_tflops"] * 1e12,
        fp8_flops_per_s=None if fp8 is None else fp8 * 1e12,
        link_bytes_per_s=row["link_gb_per_s"] * 1e9,
        link=row["link"],
        network_bytes_per_s=row["network_gb_per_s"] * 1e9,
        network=row["network"],
        per_node=row["per_node"],
        source=row["source"],
        device_names=tuple(row["device_names"]),
        prices=tuple(Price(**price) for price in row["prices"]),
    )


def find_device(name: str, *, memory_bytes: int) -> Gpu | None:
    """The GPU that torch calls so; None where none is, or where it has another memory, as a slice of one has."""
    for item in gpus():
        if name in item.device_names and abs(memory_bytes - item.memory_bytes) <= DEVICE_TOLERANCE * item.memory_bytes:
            return item
    return None


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; letter case, blanks and underscores do not matter. Raises UserError with the nearest."""
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    by_name = {item.name: item for item in gpus()}
    short = {"h100": "h100-sxm", "a100": "a100-80gb", "mi250x": "mi250x-gcd"}
    wanted = short.get(wanted, wanted)
    if wanted in by_name:
        return by_name[wanted]
    near = difflib.get_close_matches(wanted, by_name, n=3, cutoff=0.4)
    raise UserError(
        f"No GPU is called {name[:40]!r}. Nearest: {', '.join(near) or 'none'}. "
        f"Known: {', '.join(by_name)}. See `gatewright gpus`."
    )
