"""A campaign on this machine: the same links as on a cluster, each a child process started when the last one ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gatewright.campaign.advance import ready
from gatewright.campaign.fingerprint import is_done
from gatewright.campaign.folder import JobsFolder, read_json, write_json
from gatewright.campaign.queue import LOCAL_JOB
from gatewright.spec.campaign import DONE, FAILED, Campaign

POLL_S = 0.1
INTERRUPTED = 130


@dataclass(slots=True)
class Running:
    """A link that works."""

    process: subprocess.Popen[bytes]
    log: BinaryIO
    number: int


def run_local(campaign: Campaign, jobs: JobsFolder, *, at_once: int, say: Callable[[str], None]) -> int:
    """Runs every stage to its end, up to `at_once` side by side, and returns the exit code: 0 when all are done.

    Ctrl-C asks the links to save and leave; the same command goes on from there.
    """
    running: dict[str, Running] = {}
    interrupted = False
    try:
        while True:
            for name in [name for name, one in running.items() if one.process.poll() is not None]:
                _ended(running.pop(name), name, jobs, say=say)
            if not interrupted:
                free = [stage.name for stage in ready(campaign, jobs) if stage.name not in running]
                for name in free[: max(0, at_once - len(running))]:
                    running[name] = _start(name, jobs, where=campaign.where)
                    say(
                        f"{name}: link {running[name].number} works, {jobs.stage(name).log(_job(running[name].number))}"
                    )
            if not running:
                break
            try:
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                interrupted = True
                say("asked the links to save and leave")
                for one in running.values():
                    one.process.send_signal(signal.SIGTERM)
    finally:
        for one in running.values():
            one.process.kill()
    if interrupted:
        return INTERRUPTED
    return DONE if all(is_done(stage, jobs, campaign) for stage in campaign.stages) else FAILED


def _start(name: str, jobs: JobsFolder, *, where: str) -> Running:
    """Starts the stage's next link in a session of its own, so that Ctrl-C reaches this process alone."""
    folder = jobs.stage(name)
    number = _next_number(folder.path)
    log = folder.log(_job(number)).open("ab")
    process = subprocess.Popen(
        ["bash", str(folder.script)],
        cwd=where,
        env={**os.environ, LOCAL_JOB: _job(number)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Running(process, log, number)


def _next_number(folder: Path) -> int:
    numbers = [int(path.name.removeprefix("local-").split("_")[0]) for path in folder.glob("lives/local-*_0.json")]
    return max(numbers, default=0) + 1


def _job(number: int) -> str:
    return f"local-{number:03d}"


def _ended(one: Running, name: str, jobs: JobsFolder, *, say: Callable[[str], None]) -> None:
    """Says how a link ended. One that did not come to write a record would be started for ever: its stage halts."""
    one.log.close()
    folder = jobs.stage(name)
    life = next((life for life in folder.lives() if life.job == _job(one.number)), None)
    if life is not None:
        say(f"{name}: link {one.number} {life.outcome or 'was killed'}{f': {life.reason}' if life.reason else ''}")
    elif not folder.halt.exists() and one.process.returncode != DONE:
        reason = f"its script ended with exit code {one.process.returncode} before the link began; see its log"
        write_json(folder.halt, {"reason": reason, "job": _job(one.number), "time": time.time()})
    if folder.halt.exists():
        say(f"{name}: stopped: {read_json(folder.halt)['reason']}")
