"""The one file that starts SLURM commands; what they print is read in slurm_read.py."""

import getpass
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gatewright.campaign.slurm_read import (
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    Job,
    jobs_from_json,
    jobs_from_text,
    partition_limits,
    steps_from_text,
)
from gatewright.spec.errors import RunFailed, UserError

SUBMIT_TIMEOUT_S, ASK_TIMEOUT_S = 60.0, 20.0
_SILENT = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
)
_HINTS = {
    "invalid partition": "`sinfo -s` lists the partitions; set cluster.partition",
    "invalid account": "`sacctmgr show associations user=$USER` lists yours; set cluster.account",
    "time limit": "lower cluster.time_limit, or take another cluster.partition",
    "invalid qos": "set cluster.qos, or leave it out",
    "node count": "lower hardware.nodes",
    "configuration is not available": "no node has that many GPUs, cores or that much memory; see hardware.per_node, "
    "cluster.cpus_per_gpu and cluster.memory_gib",
    "submit limit": "your jobs in the queue are as many as the cluster allows; wait, or cancel some",
    "invalid generic resource": "this partition has no GPUs of that kind; set cluster.partition",
}


class QueueRefused(UserError):
    """SLURM is not here, or refused what was asked."""


class QueueSilent(RunFailed):
    """The controller does not answer; the request may be made again."""


class Slurm:
    """The queue of this machine."""

    kind = "slurm"

    def __init__(self) -> None:
        if shutil.which("sbatch") is None:
            raise QueueRefused(
                "there is no SLURM here: sbatch is not on the PATH. Submit on a login node of the cluster, or run the "
                "campaign on this machine with --local"
            )

    def submit(self, script: Path, *, exclude: Sequence[str] = ()) -> str:
        """Queues a job script and returns the job's id.

        Raises QueueRefused for what SLURM will not take, QueueSilent when it did not answer: the job may be there.
        """
        options = [f"--exclude={','.join(exclude)}"] if exclude else []
        said = _run("sbatch", "--parsable", *options, str(script), timeout_s=SUBMIT_TIMEOUT_S, env=_outside_of_jobs())
        return said.strip().splitlines()[-1].split(";")[0]

    def jobs(self, comment: str) -> list[Job]:
        """Your jobs that wait or run and whose comment begins with `comment`, the oldest first."""
        return [job for job in self.mine() if job.comment.startswith(comment) and job.alive]

    def mine(self) -> list[Job]:
        """All your jobs that the controller knows, ended ones for some minutes (MinJobAge)."""
        arguments = ("squeue", "-h", "-t", "all", "-u", getpass.getuser())
        clock = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
        try:
            jobs = jobs_from_text(_run(*arguments, "-o", SQUEUE_FIELDS, timeout_s=ASK_TIMEOUT_S, env=clock))
        except ValueError:  # a site's own squeue wrapper, or a separator inside a field
            jobs = jobs_from_json(_run(*arguments, "--json", timeout_s=ASK_TIMEOUT_S, env=clock))
        return sorted(jobs, key=lambda job: int(job.id.partition("_")[0]))

    def history(self, ids: Sequence[str]) -> dict[str, list[Job]]:
        """What the accounting knows of jobs and their steps; empty where there is none, or it lags behind."""
        if not ids:
            return {}
        clock = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
        with suppress(QueueRefused, QueueSilent, ValueError):
            return steps_from_text(
                _run("sacct", "-nP", "-j", ",".join(ids), "-o", SACCT_FIELDS, timeout_s=ASK_TIMEOUT_S, env=clock)
            )
        return {}

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancels jobs; those that are gone already are no error."""
        if ids:
            with suppress(QueueRefused):
                _run("scancel", *ids, timeout_s=ASK_TIMEOUT_S)

    def keep_from_requeue(self, job: str) -> None:
        """Has SLURM end this job for good when its node fails, as its script asks: somebody may have undone that."""
        with suppress(QueueRefused):
            _run("scontrol", "update", f"jobid={job}", "requeue=0", timeout_s=ASK_TIMEOUT_S)

    def partitions(self) -> dict[str, tuple[float | None, str]]:
        """Partition to its time limit in seconds and its availability; the default one also as ''."""
        said = _run("sinfo", "-h", "-o", "%R|%l|%a", timeout_s=ASK_TIMEOUT_S)
        limits = partition_limits(said)
        marked = _run("sinfo", "-h", "-o", "%P", timeout_s=ASK_TIMEOUT_S).split()
        default = next((name.rstrip("*") for name in marked if name.endswith("*")), None)
        return limits | ({"": limits[default]} if default in limits else {})


def _run(*command: str, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=env, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise QueueRefused(f"{command[0]} is not on the PATH of {os.uname().nodename}") from None
    except subprocess.TimeoutExpired:
        raise QueueSilent(f"{command[0]}: no answer from SLURM within {timeout_s:g} s") from None
    except OSError as error:
        raise QueueSilent(f"{command[0]}: could not be started ({error.strerror})") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(line.strip() for line in done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"
    if any(words in said for words in _SILENT):
        raise QueueSilent(f"{command[0]}: SLURM's controller does not answer ({said}); try again when it is back")
    hint = next((f"; {hint}" for words, hint in _HINTS.items() if words in said.lower()), "")
    raise QueueRefused(f"{command[0]} was refused: {said}{hint}")


def _outside_of_jobs() -> dict[str, str]:
    """The environment without what belongs to the job that this process may be part of: a job inherits the variables of
    the process that submits it, and a parent's SLURM_MEM_PER_CPU stops the child's srun."""
    kept = {"SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS"}
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(("SLURM_", "SLURMD_", "SLURM", "GATEWRIGHT_", "PMI_", "PMIX_"))
    }
