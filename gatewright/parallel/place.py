"""Where this process stands among the ranks, as torchrun or srun tells it, and where they all meet."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gatewright.spec.errors import UserError

PORTS = range(20000, 30000)
"""A rendezvous port under srun is taken from these, by job and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process of a job of `size` processes, one process a device."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    local_size: int = 1
    """Processes of the job on this node."""


ALONE = Place(rank=0, size=1, local_rank=0, address="localhost", port=0)


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place that torchrun's variables give, else those of a srun step with several tasks, else a process alone.

    Raises UserError where a variable that the others need is missing or is no number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Place(
            rank=_number(environment, "RANK"),
            size=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            local_size=_number(environment, "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "WORLD_SIZE"),
            address=_text(environment, "MASTER_ADDR"),
            port=_number(environment, "MASTER_PORT"),
        )
    # Inside sbatch, but outside srun, SLURM_PROCID is there too: only a step has SLURM_STEP_NUM_TASKS.
    if "SLURM_STEP_NUM_TASKS" in environment and _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
        nodes = _number(environment, "SLURM_STEP_NUM_NODES") if "SLURM_STEP_NUM_NODES" in environment else 1
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
        return Place(
            rank=_number(environment, "SLURM_PROCID"),
            size=tasks,
            local_rank=_number(environment, "SLURM_LOCALID"),
            local_size=-(-tasks // nodes),
            address=environment.get("MASTER_ADDR") or first_host(_text(environment, "SLURM_STEP_NODELIST")),
            port=int(environment.get("MASTER_PORT") or PORTS[(31 * job + step) % len(PORTS)]),
        )
    return ALONE


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list: `nid[0012-0020,0031],gpu7` -> `nid0012`."""
    found = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", nodelist)
    if found is None:
        raise UserError(f"SLURM_STEP_NODELIST = {nodelist!r} is not a list of hosts")
    return found[1] + (found[2] or "") + (found[3] or "")


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(f"the environment has ranks but no {name}; start with torchrun, srun, or --nproc")
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise UserError(f"{name} = {text!r} in the environment is not a number; start with torchrun, srun, or --nproc")
    return int(text)
