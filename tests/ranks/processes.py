"""Functions run on several processes that talk through gloo, forked so that nothing has to be imported again."""

import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gatewright.parallel.place import Place


def free_ports(count: int) -> list[int]:
    """As many ports as there are meetings: the store of one may outlive it, and must not be met again.

    From below those that Linux gives to sockets without a number, gloo's own among them, until the meeting begins.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(24_000, 32_000)
        with socket.socket() as probe:
            if port not in ports and probe.connect_ex(("localhost", port)):
                ports.append(port)
    return ports


def on_ranks(size: int, folder: Path, work: Callable[..., Any], *arguments: Any, patience_s: float = 120) -> list[Any]:
    """What `work(place, *arguments)` returns on each process; raises with the traceback of any that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    children = {}
    for rank in range(size):
        place = Place(rank=rank, size=size, local_rank=rank, address="localhost", port=port)
        pid = os.fork()
        if pid == 0:
            _child(place, folder, work, arguments)
        children[pid] = rank
    faults = _wait(children, folder, patience_s)
    if faults:
        raise AssertionError("\n".join(faults))
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(size)]


def _child(place: Place, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    code = 1
    try:
        torch.save(work(place, *arguments), folder / f"result-{place.rank}.pt")
        code = 0
    except BaseException:
        (folder / f"fault-{place.rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(children: dict[int, int], folder: Path, patience_s: float) -> list[str]:
    until, faults, left = time.monotonic() + patience_s, [], dict(children)
    while left and time.monotonic() < until:
        for pid, rank in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[pid]
                if status:
                    file = folder / f"fault-{rank}.txt"
                    faults.append(f"rank {rank}:\n{file.read_text() if file.exists() else f'status {status}'}")
        time.sleep(0.01)
    for pid, rank in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        faults.append(f"rank {rank} did not end within {patience_s} s")
    return faults
