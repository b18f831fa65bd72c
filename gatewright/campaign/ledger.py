"""The ledger: every start of every job in one SQLite file of the jobs folder, and the same as JSON.

The records in the folders of the stages are the truth; the ledger is an index over them that anyone may make again. So
a lock that cannot be had, a full disk or a broken file costs the ledger and never the run.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatewright.campaign.folder import JobsFolder, write_json
from gatewright.spec.campaign import Campaign, Life

NETWORK = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "wekafs", "panfs", "orangefs"),
    *("pvfs2", "virtiofs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs"),
}
"""File systems on which SQLite's WAL does not work: its index is memory that only one machine can share."""
BUSY_S, STALE_S = 10.0, 60.0
COLUMNS = (
    "stage TEXT, job TEXT, restart INTEGER, submission INTEGER, state TEXT, reason TEXT, nodes TEXT, started REAL, "
    "ended REAL, first_step INTEGER, last_step INTEGER, checkpoint INTEGER, exit_code INTEGER, successor TEXT, "
    "gpu_hours REAL, usd REAL, PRIMARY KEY (stage, job, restart)"
)
NAMES = [column.split()[0] for column in COLUMNS.split(", ")][:-3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row: a start of a job, and what it cost."""

    life: Life
    state: str
    """The outcome; running or queued where there is none yet."""
    gpu_hours: float
    usd: float | None

    def row(self) -> tuple[Any, ...]:
        life = self.life
        return (
            *(life.stage, life.job, life.restart, life.submission, self.state, life.reason, life.nodes),
            *(life.started, life.ended, life.first_step, life.last_step, life.checkpoint_after),
            *(life.exit_code, life.successor, self.gpu_hours, self.usd),
        )


def entry_of(life: Life, campaign: Campaign, *, now: float) -> Entry:
    """What a start of a job cost until it ended, or until now."""
    stage = next((one for one in campaign.stages if one.name == life.stage), None)
    gpus, price = (stage.resources.gpus, stage.usd_per_gpu_hour) if stage else (0, None)
    gpu_hours = max(0.0, (life.ended or now) - life.started) / 3600 * gpus
    usd = None if price is None else gpu_hours * price
    return Entry(life=life, state=life.outcome or "running", gpu_hours=gpu_hours, usd=usd)


def update_ledger(jobs: JobsFolder, campaign: Campaign, *, now: float | None = None) -> str | None:
    """Brings the ledger and its JSON up to the records; returns what went wrong, if anything did."""
    at = time.time() if now is None else now
    entries = [entry_of(life, campaign, now=at) for stage in campaign.stages for life in jobs.stage(stage.name).lives()]
    try:
        try:
            _write(jobs.ledger, entries)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            os.replace(jobs.ledger, jobs.ledger.with_suffix(".broken"))
            _write(jobs.ledger, entries)
        write_json(jobs.ledger.with_suffix(".json"), [dict(zip(NAMES, one.row(), strict=True)) for one in entries])
    except (sqlite3.Error, OSError) as error:
        return f"{jobs.ledger}: not brought up to date ({error}); the records of the stages are complete"
    return None


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The rows, the earliest start first. Raises sqlite3.Error or OSError."""
    with closing(_open(path)) as database:
        database.row_factory = sqlite3.Row
        rows = database.execute("SELECT * FROM lives ORDER BY started, job, restart").fetchall()
    return [dict(row) for row in rows]


def _write(path: Path, entries: Iterable[Entry]) -> None:
    with closing(_open(path)) as database, _transaction(database):
        database.execute(f"CREATE TABLE IF NOT EXISTS lives ({COLUMNS})")
        marks = ", ".join("?" * len(NAMES))
        database.executemany(f"INSERT OR REPLACE INTO lives VALUES ({marks})", [one.row() for one in entries])


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Takes the writer's lock at once: a lock that is taken later may not be had any more."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def _open(path: Path) -> sqlite3.Connection:
    """With WAL on a local disk, with a rollback journal on a network disk, and with a lock file where the disk knows no
    POSIX locks."""
    vfs = "" if _knows_locks(path.parent) else "?vfs=unix-dotfile"
    if vfs:
        _remove_stale(path.with_name(path.name + ".lock"))
    database = sqlite3.connect(f"file:{path}{vfs}", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        database.execute(f"PRAGMA journal_mode={'DELETE' if vfs or file_system(path) in NETWORK else 'WAL'}")
        database.execute("PRAGMA synchronous=FULL")
    except BaseException:
        database.close()
        raise
    return database


def file_system(path: Path, *, mounts: str | None = None) -> str:
    """Type of the file system that a path lies on: the mount with the longest matching folder."""
    text = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace") if mounts is None else mounts
    place = str(path.absolute())
    best, kind = "", ""
    for line in text.splitlines():
        _, folder, type_of, *_ = line.split(" ")
        folder = folder.replace("\\040", " ").rstrip("/")
        if len(folder) >= len(best) and (place == folder or place.startswith(folder + "/")):
            best, kind = folder, type_of
    return kind


def _knows_locks(folder: Path) -> bool:
    """Whether POSIX locks work there; Lustre mounted without flock, and some NFS, refuse them."""
    probe = folder / f".lock-probe.{os.getpid()}"
    try:
        with probe.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _remove_stale(lock: Path) -> None:
    """A writer that was killed leaves its lock file; ours are held for milliseconds."""
    with suppress(OSError):
        if time.time() - lock.stat().st_mtime > STALE_S:
            lock.rmdir() if lock.is_dir() else lock.unlink()
