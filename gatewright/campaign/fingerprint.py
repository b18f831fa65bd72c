"""What a stage's result depends on, as one hash: its configuration, its inputs, and the stages before it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from gatewright.campaign.folder import JobsFolder, StageFolder, read_json
from gatewright.spec.campaign import Campaign, Stage

WHOLE_BYTES, END_BYTES = 2**24, 2**20
"""Files up to the first are hashed whole; of larger ones the size, the time of change, and so much at either end."""


def config_hash(value: Any) -> str:
    """sha256 of plain values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def stage_fingerprint(stage: Stage, jobs: JobsFolder, *, where: Path) -> str:
    """The hash that a finished stage is known by; taken when its parents are done, so that what they made is there."""
    digest = hashlib.sha256(stage.config.encode())
    for name in stage.inputs:
        digest.update(f"\n{name} {_content_hash(where / name)}".encode())
    for parent in stage.needs:
        digest.update(f"\n{parent} {_done_fingerprint(jobs.stage(parent))}".encode())
    return digest.hexdigest()


def is_done(stage: Stage, jobs: JobsFolder, campaign: Campaign) -> bool:
    """Whether the stage has been finished as it is now, and so have those before it."""
    done = _done_fingerprint(jobs.stage(stage.name))
    if done is None or not all(is_done(campaign.stage(parent), jobs, campaign) for parent in stage.needs):
        return False
    return done == stage_fingerprint(stage, jobs, where=Path(campaign.where))


def looks_done(stage: Stage, folder: StageFolder) -> bool:
    """Whether the stage was finished with the configuration it has; its inputs are not read again, which takes time."""
    try:
        return bool(read_json(folder.done)["config"] == stage.config)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _done_fingerprint(folder: StageFolder) -> str | None:
    try:
        return str(read_json(folder.done)["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _content_hash(path: Path) -> str:
    """Of a file its content, of a folder the names and contents below it; `missing` where there is nothing."""
    try:
        if not path.is_dir():
            return _file_hash(path)
        digest = hashlib.sha256()
        for file in sorted(one for one in path.rglob("*") if one.is_file()):
            digest.update(f"{file.relative_to(path)} {_file_hash(file)}\n".encode())
        return digest.hexdigest()
    except OSError:
        return "missing"


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size} {path.stat().st_mtime_ns}".encode())
        digest.update(file.read(END_BYTES))
        file.seek(-END_BYTES, 2)
        digest.update(file.read(END_BYTES))
        return digest.hexdigest()
