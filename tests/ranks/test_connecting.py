"""A rank that dies after ranks met, and before all have their connections: the others end soon, and it is named."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import free_ports

from gatewright.parallel import alive
from gatewright.parallel.failure import fail_together
from gatewright.parallel.layout import Layout
from gatewright.parallel.meeting import Meeting, meet
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks

RANKS, LAYOUT = 4, Layout(ranks=4, ep=2)
TIMEOUT_S = 60.0


def die(meeting: Meeting) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_between_groups(meeting: Meeting) -> None:
    """With the first group's connections made, and what is said through them, but none of the next group's."""
    dist.init_process_group("gloo", store=meeting.own_connection(), rank=meeting.place.rank, world_size=RANKS)
    every = [None] * RANKS
    dist.all_gather_object(every, LAYOUT)
    die(meeting)


def as_rank(place: Place, log: Path, victim: int, dies: Callable[[Meeting], None]) -> None:
    """Never returns: 0 where it joined, 1 by force, as the command would end."""
    sys.stderr = log.open("w")
    try:
        if place.rank == victim:
            meeting = meet(place, timeout_s=TIMEOUT_S)
            with fail_together(meeting):
                meeting.wait_for_all(timeout_s=TIMEOUT_S)
                dies(meeting)
        with join_ranks(place, LAYOUT, device=torch.device("cpu"), timeout_s=TIMEOUT_S) as ranks:
            ranks.wait()
            os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)


@pytest.mark.parametrize(
    ("victim", "dies"), [(2, die), (1, die_between_groups), (0, die)], ids=["before", "between groups", "rank 0"]
)
def test_a_rank_that_dies_while_ranks_connect_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, dies: Callable[[Meeting], None]
) -> None:
    monkeypatch.setattr(alive, "SILENCE_S", 2.0)
    [port], began, pids = free_ports(1), time.monotonic(), []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            place = Place(rank=rank, size=RANKS, local_rank=rank, address="localhost", port=port)
            as_rank(place, tmp_path / f"{rank}.log", victim, dies)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert codes[victim] == -signal.SIGKILL and all(codes)
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(RANKS)]
    if victim != 0:  # with rank 0 the store goes, and connections to it break
        said = [f"rank {victim} came, and then was not heard of for 2 s while ranks connected" in log for log in logs]
        assert sum(said) == 1, logs
