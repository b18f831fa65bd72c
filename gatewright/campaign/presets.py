"""Presets of machines: what a cluster needs set, and why; data in catalog/clusters."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gatewright.spec.errors import RunFileError
from gatewright.spec.keys import nearest

CLUSTERS = Path(__file__).parent.parent / "catalog" / "clusters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable; the shell fills in $USER and $SLURM_JOB_ID when the job runs."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A machine."""

    name: str
    title: str
    source: str
    date: str
    gpu: str | None = None
    """Name in `gatewright gpus`."""
    per_node: int | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    limits: dict[str, str] = field(default_factory=dict)
    """Longest job of a partition, as documented; a SLURM that is at hand is asked instead."""
    launcher: str = "srun"
    gpu_option: str = "--gres=gpu:{gpus}"
    cpus_per_gpu: int | None = None
    memory_gib: int | None = None
    """Of a node, for jobs."""
    cpu_bind: str | None = None
    """Of one task a GPU on a whole node."""
    cpu_bind_why: str = ""
    container_option: str = ""
    """What gives a container the GPUs."""
    binds: tuple[str, ...] = ()
    """Folders that containers need."""
    env: tuple[Variable, ...] = ()
    notes: tuple[str, ...] = ()


def presets() -> list[Preset]:
    """All of them, by name."""
    return [_preset(json.loads(file.read_bytes())) for file in sorted(CLUSTERS.glob("*.json"))]


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises RunFileError that lists those there are."""
    known = {preset.name: preset for preset in presets()}
    if name not in known:
        near = nearest(name, known)
        raise RunFileError(
            f"cluster.machine: no machine is called {name!r}{f'; did you mean {near}?' if near else ''} "
            f"Known: {', '.join(known)}"
        )
    return known[name]


def _preset(value: dict[str, Any]) -> Preset:
    return Preset(
        **value
        | {
            "binds": tuple(value.get("binds", ())),
            "notes": tuple(value.get("notes", ())),
            "env": tuple(Variable(name=name, value=text, why=why) for name, text, why in value["env"]),
        }
    )
