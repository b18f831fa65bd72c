"""What the tests of chains do again and again: write a campaign, submit it, look at it, and disturb it."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lab import Lab

from gatewright.campaign.folder import JobsFolder, StageFolder
from gatewright.spec.campaign import Life

STANDIN = Path(__file__).parent / "standin.py"
GATEWRIGHT = (sys.executable, "-m", "gatewright")


def write_standin(
    folder: Path, *, steps: int, step_s: float, save_every: int, limit: str, links: int, more: str = "", after: str = ""
) -> Path:
    """A campaign whose stage `sft` is the stand-in, and whatever stages `after` adds."""
    command = f"{sys.executable} {STANDIN} runs/sft --steps {steps} --step-s {step_s} --save-every {save_every} {more}"
    file = folder / "chain.yaml"
    file.write_text(
        f"campaign: chain\ncluster: {{time_limit: {limit}}}\nstages:\n"
        f"  sft: {{command: {json.dumps(command)}, folder: runs/sft, links: {links}, cpus: 1, memory_gib: 1}}\n{after}"
    )
    return file


def submit(lab: Lab, file: Path, *options: str, check: bool = True) -> str:
    return lab.run(*GATEWRIGHT, "submit", str(file), *options, cwd=file.parent, check=check)


def stage(folder: Path, campaign: str = "chain", name: str = "sft") -> StageFolder:
    return JobsFolder(folder / "runs" / campaign / "jobs").stage(name)


def story(folder: StageFolder) -> str:
    """For the message of a failed assertion: every life, and the end of every log."""
    lives = "\n".join(str(life) for life in folder.lives())
    logs = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in folder.path.glob("*.out"))
    halt = folder.halt.read_text() if folder.halt.exists() else ""
    return f"{lives}\n{halt}\n{logs}"


def wait_until(folder: StageFolder, ready: Callable[[], object], what: str, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert not folder.halt.exists(), f"halted while waiting for {what}\n{story(folder)}"
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}\n{story(folder)}"
        time.sleep(0.05)


def working(folder: StageFolder) -> Life | None:
    """The life whose work has begun and not ended."""
    return next((life for life in reversed(folder.lives()) if life.outcome is None), None)


def steps_of(run_folder: Path) -> list[dict[str, object]]:
    """The step events of a run, in the order they were written."""
    return [event for event in events_of(run_folder) if event["kind"] == "step"]


def events_of(run_folder: Path) -> list[dict[str, object]]:
    file = run_folder / "events.jsonl"
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # cut off by a kill
    return found


def link_process(job: str) -> int | None:
    """Process id of a job's batch script, which is the link."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            mine = f"SLURM_JOB_ID={job}".encode() in (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine and b"gatewright.campaign.link" in words:
            return int(place.name)
    return None


def worker_process(job: str, *, word: str) -> int | None:
    """Process id of a job's task: the one whose command line holds a word and that srun is not."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            environ = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mine = f"SLURM_JOB_ID={job}".encode() in environ and any(one.startswith(b"SLURM_PROCID=") for one in environ)
        if mine and any(word.encode() in one for one in words) and b"python" in Path(words[0].decode()).name.encode():
            return int(place.name)
    return None


def kill_link(job: str) -> bool:
    process = link_process(job)
    if process is not None:
        os.kill(process, signal.SIGKILL)
    return process is not None


def kill_for_memory(lab: Lab, job: str, *, word: str) -> None:
    """Has the kernel kill a job's step for want of memory, where there are control groups; elsewhere does it itself."""
    groups = list(Path("/sys/fs/cgroup/memory").glob(f"slurm_n*/uid_*/job_{job}/step_0")) if lab.cgroup else []
    deadline = time.monotonic() + 20
    while worker := worker_process(job, word=word):
        assert time.monotonic() < deadline, "the kernel did not kill it"
        for group in groups:
            for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
                try:
                    (group / name).write_text((group / "memory.usage_in_bytes").read_text())
                except OSError:
                    continue
        if not groups:
            os.kill(worker, signal.SIGKILL)
        time.sleep(0.05)
