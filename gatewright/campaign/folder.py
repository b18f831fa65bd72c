"""The jobs folder of a campaign: where each file lies, and how it is written so that nobody ever reads half of it.

runs/NAME/jobs/
    campaign.json               what was submitted
    ledger.sqlite, ledger.json  every job: an index, made again from the records at any time
    submitting                  held while someone submits
    STAGE/
        job.sbatch              the text the queue got
        run.yaml                the resolved run file of a training stage
        lives/JOB_RESTART.json  one record for each start of a job
        command.sh              the command of any other stage
        exit-JOB_RESTART        the exit code of a command, written by itself
        stop-JOB_RESTART        that job was asked to stop
        done.json               finished, with the hash of its configuration and inputs
        halt.json               will not go on by itself, and why
        JOB.out                 what the job said
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gatewright.spec.campaign import Campaign, Life, campaign_from_json, campaign_to_json, life_from_json
from gatewright.spec.errors import UserError

LOCK_IS_STALE_AFTER_S = 600.0
_COMMENT = "gatewright:"


class JobsFolderError(UserError):
    """The jobs folder cannot be written, holds no campaign, or is in use."""


@dataclass(frozen=True, slots=True)
class StageFolder:
    """Paths of one stage."""

    path: Path

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def command(self) -> Path:
        return self.path / "command.sh"

    @property
    def run_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def done(self) -> Path:
        return self.path / "done.json"

    @property
    def halt(self) -> Path:
        return self.path / "halt.json"

    @property
    def comment(self) -> str:
        """How a job in the queue says that it belongs to this stage."""
        return f"{_COMMENT}{self.path.absolute()}"

    def life(self, key: str) -> Path:
        return self.path / "lives" / f"{key}.json"

    def stop(self, key: str) -> Path:
        return self.path / f"stop-{key}"

    def exit(self, key: str) -> Path:
        return self.path / f"exit-{key}"

    def log(self, job: str) -> Path:
        return self.path / f"{job}.out"

    def write_life(self, life: Life) -> None:
        write_json(self.life(life.key), asdict(life))

    def lives(self) -> list[Life]:
        """Every start so far, the earliest first. A record that cannot be read is passed over."""
        found = []
        for file in (self.path / "lives").glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(life_from_json(read_json(file)))
        return sorted(found, key=lambda life: life.started)


@dataclass(frozen=True, slots=True)
class JobsFolder:
    """Paths of a campaign."""

    path: Path

    @property
    def campaign_file(self) -> Path:
        return self.path / "campaign.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def comments(self) -> str:
        """What the comments of all its stages begin with."""
        return f"{_COMMENT}{self.path.absolute()}/"

    def stage(self, name: str) -> StageFolder:
        return StageFolder(self.path / name)

    def campaign(self) -> Campaign | None:
        """What was submitted here; None where nothing was. Raises JobsFolderError where it cannot be read."""
        if not self.campaign_file.is_file():
            return None
        try:
            return campaign_from_json(read_json(self.campaign_file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobsFolderError(
                f"{self.campaign_file}: unreadable ({error}); move it away and submit again: what was done is in the "
                "folders of the stages"
            ) from None

    def write_campaign(self, campaign: Campaign) -> None:
        write_json(self.campaign_file, campaign_to_json(campaign))

    @contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[None]:
        """Holds the folder against other submitters, on any node. Raises JobsFolderError when another has it.

        A file made with O_EXCL is the one lock that every network file system honours.
        """
        lock, until = self.path / "submitting", time.monotonic() + wait_s
        self.path.mkdir(parents=True, exist_ok=True)
        while not _take(lock):
            if time.monotonic() >= until:
                raise JobsFolderError(
                    f"{self.path}: {_holder(lock)} is submitting it at this moment; wait for it. If that process is "
                    f"gone, remove {lock}"
                )
            time.sleep(0.1)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a file whole: synced beside its place, then moved there. Raises OSError; the old file is untouched."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Like `write_json`, for any text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def newest_checkpoint(run_folder: Path | None) -> int | None:
    """Step of the newest checkpoint that has a manifest; None where there is none."""
    if run_folder is None:
        return None
    steps = [path.parent.name.removeprefix("step-") for path in run_folder.glob("checkpoints/step-*/manifest.json")]
    return max((int(step) for step in steps if step.isdecimal()), default=None)


# --- the lock -----------------------------------------------------------------------------------------------------


def _take(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        if not _is_stale(lock):
            return False
        with suppress(OSError):  # whoever moves it away first may try again
            gone = lock.with_name(f".{lock.name}.{os.getpid()}.stale")
            os.rename(lock, gone)
            gone.unlink()
        return False
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}, file)
    except OSError as error:
        lock.unlink(missing_ok=True)
        raise JobsFolderError(f"{lock}: cannot be written ({error.strerror}); nothing was submitted") from None
    return True


def _is_stale(lock: Path) -> bool:
    """Whether its holder is dead: seen on the same host, guessed from its age on another."""
    try:
        age_s = time.time() - lock.stat().st_mtime
        held = read_json(lock)
        if held["host"] == socket.gethostname():
            os.kill(int(held["process"]), 0)
            return False
        return age_s > LOCK_IS_STALE_AFTER_S
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return age_s > LOCK_IS_STALE_AFTER_S


def _holder(lock: Path) -> str:
    try:
        held = read_json(lock)
        return f"process {held['process']} on {held['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
