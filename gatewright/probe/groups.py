"""Two process groups over the GPUs of this node (two CPU processes without any): each must reduce, the second too."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gatewright.probe.children import Wanted, last_line
from gatewright.spec.probe import Groups

CPU_RANKS = 2
LARGE = {"nccl": 64 * 2**20, "gloo": 4 * 2**20}
"""Elements of the all-reduce that is timed."""
GIVE_UP = timedelta(seconds=120)


def measure_groups(wanted: Wanted) -> tuple[str, dict[str, object]]:
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="gatewright-probe-") as place:
        folder = Path(place)
        started = []
        for rank in range(ranks):
            with (folder / f"stderr-{rank}").open("wb") as stderr:
                command = [sys.executable, "-m", "gatewright.probe.groups", str(rank), str(ranks), place]
                started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr))
        wait(started, folder)
        groups = Groups(**json.loads((folder / "answer.json").read_bytes()))
    return (
        f"{groups.backend}, {groups.ranks} ranks: first group {groups.first_s:.2f} s, second {groups.second_s:.2f} s, "
        f"{groups.bytes_per_s / 1e9:.2f} GB/s all-reduced",
        asdict(groups),
    )


def wait(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all ranks are done. Ends the others when one fails, and raises RuntimeError with its last words."""
    left = dict(enumerate(started))
    while left:
        for rank, process in list(left.items()):
            code = process.poll()
            if code is None:
                continue
            del left[rank]
            if code:
                for other in left.values():
                    other.kill()
                raise RuntimeError(f"rank {rank} ended with {code}: {last_line(folder / f'stderr-{rank}')}")
        time.sleep(0.02)


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    """One rank: the world's group, a second one, and a large all-reduce."""
    gpu = torch.cuda.is_available()
    backend, device = ("nccl", torch.device("cuda", rank)) if gpu else ("gloo", torch.device("cpu"))
    if gpu:
        torch.cuda.set_device(device)
    began = time.perf_counter()
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=GIVE_UP,
        device_id=device if gpu else None,
    )
    reduce_ones(None, ranks, device)
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    second = dist.new_group(list(range(ranks)), timeout=GIVE_UP)
    reduce_ones(second, ranks, device)
    second_s = time.perf_counter() - began
    payload = torch.ones(LARGE[backend], device=device)
    began = time.perf_counter()
    dist.all_reduce(payload)
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if rank == 0:
        groups = Groups(
            backend=backend,
            ranks=ranks,
            first_s=first_s,
            second_s=second_s,
            bytes_per_s=payload.numel() * payload.element_size() / seconds,
        )
        (folder / "answer.json").write_text(json.dumps(asdict(groups)), encoding="utf-8")
    dist.destroy_process_group()


def reduce_ones(group: dist.ProcessGroup | None, ranks: int, device: torch.device) -> None:
    """Raises RuntimeError where the sum over the ranks is wrong."""
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones, group=group)
    if not bool((ones == ranks).all()):
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {float(ones[0])}")


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
