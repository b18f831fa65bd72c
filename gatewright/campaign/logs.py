"""The logs of a stage's jobs, one behind the other in the order in which they began; followed from link to link."""

import time
from collections.abc import Iterator
from pathlib import Path

from gatewright.campaign.folder import StageFolder

POLL_S = 0.5


def log_files(folder: StageFolder) -> list[Path]:
    """The logs that there are, the earliest first."""
    return sorted(folder.path.glob("*.out"), key=lambda file: (file.stat().st_ctime_ns, file.name))


def tail(folder: StageFolder, *, lines: int) -> Iterator[str]:
    """The last lines of the newest log, with its name before them."""
    files = log_files(folder)
    if files:
        yield f"==> {files[-1]} <=="
        yield from files[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]


def follow(folder: StageFolder, *, lines: int, poll_s: float = POLL_S) -> Iterator[str]:
    """The same, and then every new line; goes over to the next link's log; ends when the stage is done or halted."""
    yield from tail(folder, lines=lines)
    files = log_files(folder)
    current = files[-1] if files else None
    at = current.stat().st_size if current else 0
    pending = ""
    while True:
        over = folder.done.exists() or folder.halt.exists()
        if current is not None:
            with current.open("rb") as file:
                file.seek(at)
                fresh = file.read()
            at += len(fresh)
            *whole, pending = (pending + fresh.decode(errors="replace")).split("\n")
            yield from whole
        newer = [file for file in log_files(folder) if current is None or file not in files]
        if newer:
            current, at, pending = newer[0], 0, ""
            files = [*files, current]
            yield f"==> {current} <=="
        elif over:
            return
        else:
            time.sleep(poll_s)
