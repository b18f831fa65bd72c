"""The queue as a link sees it: SLURM, or none at all when a campaign runs on this machine."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gatewright.campaign.slurm import QueueRefused, Slurm
from gatewright.campaign.slurm_read import Job

LOCAL_JOB = "GATEWRIGHT_LOCAL_JOB"
"""Set by the driver of --local: the number of the link."""


class Queue(Protocol):
    """What a link and the verbs ask of a queue."""

    kind: str

    def submit(self, script: Path, *, exclude: Sequence[str] = ()) -> str: ...
    def jobs(self, comment: str) -> list[Job]: ...
    def mine(self) -> list[Job]: ...
    def history(self, ids: Sequence[str]) -> dict[str, list[Job]]: ...
    def cancel(self, ids: Sequence[str]) -> None: ...
    def keep_from_requeue(self, job: str) -> None: ...


class NoQueue:
    """Without a queue nothing waits: the driver of --local starts a link when the one before it has ended."""

    kind = "local"

    def submit(self, script: Path, *, exclude: Sequence[str] = ()) -> str:
        raise AssertionError("links of --local are started by its driver")

    def jobs(self, comment: str) -> list[Job]:
        return []

    def mine(self) -> list[Job]:
        return []

    def history(self, ids: Sequence[str]) -> dict[str, list[Job]]:
        return {}

    def cancel(self, ids: Sequence[str]) -> None:
        pass

    def keep_from_requeue(self, job: str) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """The job that this process is."""

    job: str
    restart: int
    nodes: str

    @property
    def key(self) -> str:
        return f"{self.job}_{self.restart}"


def here(environ: Mapping[str, str] = os.environ) -> tuple[Queue, Me]:
    """The queue that started this process, and which of its jobs it is."""
    if LOCAL_JOB in environ:
        return NoQueue(), Me(job=environ[LOCAL_JOB], restart=0, nodes=socket.gethostname())
    if "SLURM_JOB_ID" not in environ:
        raise QueueRefused("a link is started by sbatch, or by `gatewright submit --local`; this process is no job")
    return Slurm(), Me(
        job=environ["SLURM_JOB_ID"],
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        nodes=environ.get("SLURM_JOB_NODELIST", ""),
    )
