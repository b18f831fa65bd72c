"""Whole runs on several processes, as torchrun would start them: started, watched, killed, and started again."""

import os
import signal
import time
import traceback
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from processes import free_ports
from rich.console import Console

from gatewright.spec.errors import GatewrightError
from gatewright.spec.run import Run
from gatewright.train import loop

BUG = 70


@dataclass
class Started:
    """The processes of a run, by rank."""

    run: Run
    pids: list[int]

    def log(self, rank: int) -> str:
        return _log(self.run, rank).read_text()

    def wait(self, *, patience_s: float) -> list[int]:
        """Exit codes, negative for a signal; fails the test where a rank does not end in time."""
        until, codes = time.monotonic() + patience_s, dict.fromkeys(self.pids, None)
        while None in codes.values():
            for pid in [pid for pid, code in codes.items() if code is None]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                late = [rank for rank, pid in enumerate(self.pids) if codes[pid] is None]
                self.kill_all([pid for pid, code in codes.items() if code is None])
                raise AssertionError(f"ranks {late} had not ended after {patience_s} s")
            time.sleep(0.005)
        return [codes[pid] for pid in self.pids]

    def kill_all(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def start(run: Run, size: int, *, absent: Container[int] = ()) -> Started:
    """Starts the run on so many processes, but for the absent ranks; each writes what it says, and its error, into a
    log."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    pids = []
    for rank in (rank for rank in range(size) if rank not in absent):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            _child(run, rank)
        pids.append(pid)
    return Started(run, pids)


def finish(run: Run, size: int, *, patience_s: float = 120) -> None:
    """Runs to the end on so many ranks, or demands to know why not."""
    started = start(run, size)
    codes = started.wait(patience_s=patience_s)
    assert codes == [0] * size, "\n".join(started.log(rank) for rank in range(size))


def _child(run: Run, rank: int) -> None:
    code = BUG
    with _log(run, rank).open("w") as log:
        try:
            code = loop.train(run, console=Console(file=log))
        except GatewrightError as error:
            log.write(f"error: {error}\n")
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            log.write(traceback.format_exc())
        finally:
            log.flush()
            os._exit(code)


def _log(run: Run, rank: int) -> Path:
    return run.folder.parent / f"{run.run}-rank-{rank}.log"
