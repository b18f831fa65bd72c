"""Where a run writes: speed with sync, bytes and inodes left; and /dev/shm."""

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from gatewright.probe.absent import Absent
from gatewright.probe.children import Wanted
from gatewright.spec.probe import Disk, Shm

GIB = 2**30
PIECE = 2**20
SMALL = 4096
SYNCS = 5
SHARED = frozenset(
    ("lustre", "nfs", "nfs4", "gpfs", "beegfs", "ceph", "fuse.ceph", "panfs", "cifs", "smb3", "wekafs", "pvfs2")
)
"""File systems that other nodes see too."""
MOUNTS = Path("/proc/mounts")


def measure_disk(wanted: Wanted) -> tuple[str, dict[str, object]]:
    """Writes and syncs a file beside where the checkpoints will be, at most a tenth of what is free."""
    folder = existing(Path(wanted.folder))
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    size = min(wanted.write_bytes, free // 10) // PIECE * PIECE
    if size == 0:
        raise OSError(f"{folder} has {free:,} bytes free: nothing was written")
    with tempfile.TemporaryDirectory(prefix=".gatewright-probe-", dir=folder) as place:
        written_s = write_synced(Path(place) / "large", pieces=size // PIECE, piece=os.urandom(PIECE))
        syncs = [
            write_synced(Path(place) / f"small-{index}", pieces=1, piece=os.urandom(SMALL)) for index in range(SYNCS)
        ]
    disk = Disk(
        path=str(folder.resolve()),
        kind=file_system(folder),
        free_bytes=free,
        free_inodes=free_inodes(space),
        written_bytes=size,
        write_bytes_per_s=size / written_s,
        sync_s=sorted(syncs)[SYNCS // 2],
    )
    inodes = "inodes not counted" if disk.free_inodes is None else f"{disk.free_inodes:,} inodes left"
    return (
        f"{disk.path} ({disk.kind}): {disk.write_bytes_per_s / 1e6:,.0f} MB/s written and synced, "
        f"{free / GIB:,.1f} GiB and {inodes}",
        asdict(disk),
    )


def write_synced(path: Path, *, pieces: int, piece: bytes) -> float:
    """Seconds to write a new file of so many pieces and have it on the disk."""
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(pieces):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return max(time.perf_counter() - began, 1e-9)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_inodes(space: os.statvfs_result) -> int | None:
    return space.f_favail if space.f_files else None


def file_system(path: Path, mounts: str | None = None) -> str:
    """Kind of the file system that holds the path; `unknown` where the kernel does not list it."""
    text = MOUNTS.read_text(encoding="utf-8", errors="replace") if mounts is None else mounts
    real, found = str(path.resolve()), ("", "unknown")
    for line in text.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, words[2])
    return found[1]


def measure_shm(wanted: Wanted) -> tuple[str, dict[str, object]]:
    if not Path("/dev/shm").is_dir():
        raise Absent("this system has no /dev/shm")
    space = os.statvfs("/dev/shm")
    shm = Shm(total_bytes=space.f_blocks * space.f_frsize, free_bytes=space.f_bavail * space.f_frsize)
    return f"{shm.free_bytes / GIB:.2f} of {shm.total_bytes / GIB:.2f} GiB free", asdict(shm)
