"""All-to-alls of a few sizes, timed over the GPUs of this node, or two CPU processes: what an exchange costs."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gatewright.probe.groups import CPU_RANKS, wait

SIZES = {"nccl": (2**12, 2**20, 2**24), "gloo": (2**8, 2**16, 2**20)}
"""Bytes from each rank to each other."""
REPEATS = 5
GIVE_UP = timedelta(seconds=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    backend: str
    ranks: int
    bytes_per_s: float
    """That a rank receives."""
    hop_s: float
    """For each further rank."""


def measure_links() -> Links | None:
    """None where this node has one GPU: there is nothing to exchange with. Raises RuntimeError where a rank fails."""
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else CPU_RANKS
    if ranks < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="gatewright-probe-") as place:
        folder, started = Path(place), []
        for rank in range(ranks):
            with (folder / f"stderr-{rank}").open("wb") as stderr:
                command = [sys.executable, "-m", "gatewright.probe.links", str(rank), str(ranks), place]
                started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr))
        wait(started, folder)
        return Links(**json.loads((folder / "answer.json").read_bytes()))


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    gpu = torch.cuda.is_available()
    backend, device = ("nccl", torch.device("cuda", rank)) if gpu else ("gloo", torch.device("cpu"))
    if gpu:
        torch.cuda.set_device(device)
    place = f"file://{folder / 'rendezvous'}"
    dist.init_process_group(
        backend,
        init_method=place,
        rank=rank,
        world_size=ranks,
        timeout=GIVE_UP,
        device_id=device if gpu else None,
    )
    taken = [exchange_s(size, ranks, device) for size in SIZES[backend]]
    if rank == 0:
        links = link_rates(SIZES[backend], taken, backend=backend, ranks=ranks)
        (folder / "answer.json").write_text(json.dumps(asdict(links)), encoding="utf-8")
    dist.destroy_process_group()


def exchange_s(size: int, ranks: int, device: torch.device) -> float:
    """Of one all-to-all of so many bytes between each two ranks: the best of a few."""
    sent = torch.ones(ranks * size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    best = float("inf")
    for _ in range(1 + REPEATS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_to_all_single(received, sent)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best


def link_rates(sizes: tuple[int, ...], taken: list[float], *, backend: str, ranks: int) -> Links:
    """A latency for each further rank and a rate, by least squares of relative errors; the latency is at least 0."""
    others, times = ranks - 1, np.array(taken)
    parts = np.stack([np.full(len(sizes), float(others)), others * np.array(sizes, np.float64)], axis=1)
    hop_s, byte_s = np.linalg.lstsq(parts / times[:, None], np.ones(len(times)), rcond=None)[0]
    if hop_s < 0 or byte_s <= 0:
        hop_s, byte_s = 0.0, float(times[-1] / parts[-1, 1])
    return Links(backend=backend, ranks=ranks, bytes_per_s=float(1 / byte_s), hop_s=float(hop_s))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
