"""Campaign files: YAML to CampaignFile, with every mistake at once; a run file is a campaign of one stage."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gatewright.spec.campaign_file import CampaignFile, StageFile
from gatewright.spec.document import Place, read_yaml
from gatewright.spec.errors import RunFileError
from gatewright.spec.keys import nearest
from gatewright.spec.read import read_run
from gatewright.spec.run import Cluster, Run

TRAIN = "train"
"""Name of the one stage of a run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person asked for, read and checked, nothing looked up yet."""

    name: str
    runs_dir: str
    stages: dict[str, StageFile]
    runs: dict[str, Run]
    """The runs among the stages."""
    cluster: Cluster
    """Of the stages that are commands."""

    @property
    def folder(self) -> Path:
        return Path(self.runs_dir) / self.name


def read_asked(path: Path, overrides: Sequence[str] = ()) -> Asked:
    """Reads a run file or a campaign file. Raises RunFileError."""
    if not re.search(r"^campaign\s*:", _text(path), re.MULTILINE):
        run = read_run(path, overrides)
        return Asked(
            name=run.run,
            runs_dir=run.runs_dir,
            stages={TRAIN: StageFile(run=str(path))},
            runs={TRAIN: run},
            cluster=run.cluster or Cluster(),
        )
    if overrides:
        raise RunFileError(f"{path} is a campaign file; --set overrides keys of a run file. Write them into its runs")
    return _read_campaign(path)


def _read_campaign(path: Path) -> Asked:
    written = read_yaml(_text(path), lambda line: Place(line, f"{path}:{line}"))
    if written.mistakes:
        raise RunFileError("\n  ".join(str(mistake) for mistake in written.mistakes))
    try:
        file = CampaignFile.model_validate(written.value)
    except ValidationError as error:
        raise RunFileError(
            _mistakes(path, error, {key: spot.place.text for key, spot in written.spots.items()})
        ) from None
    refuse_unordered(file, path)
    runs = {name: read_run(path.parent / stage.run) for name, stage in file.stages.items() if stage.run is not None}
    owners: dict[Path, str] = {}
    for name, run in runs.items():
        if other := owners.get(run.folder.absolute()):
            raise RunFileError(
                f"{path}: stages {other} and {name} both train in {run.folder}; name one of the runs anew"
            )
        owners[run.folder.absolute()] = name
    return Asked(name=file.campaign, runs_dir=file.runs_dir, stages=dict(file.stages), runs=runs, cluster=file.cluster)


def refuse_unordered(file: CampaignFile, path: Path) -> None:
    """Raises RunFileError where a stage needs one that there is not, or itself by way of others."""
    for name, stage in file.stages.items():
        for need in stage.needs:
            if need not in file.stages:
                near = nearest(need, file.stages)
                hint = f"; did you mean {near}?" if near else f"; there are {', '.join(file.stages)}"
                raise RunFileError(f"{path}: stages.{name}.needs: no stage is called {need!r}{hint}")
    finished: set[str] = set()
    while len(finished) < len(file.stages):
        free = [
            name for name, stage in file.stages.items() if name not in finished and finished.issuperset(stage.needs)
        ]
        if not free:
            raise RunFileError(
                f"{path}: the stages wait for each other: {_cycle(file, finished)}; take one `needs` out of the circle"
            )
        finished.update(free)


def _cycle(file: CampaignFile, finished: set[str]) -> str:
    """`a needs b needs a`: one circle among the stages that cannot start."""
    name = next(name for name in file.stages if name not in finished)
    walk = [name]
    while walk.count(walk[-1]) < 2:
        walk.append(next(need for need in file.stages[walk[-1]].needs if need not in finished))
    return " needs ".join(walk[walk.index(walk[-1]) :])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        read_run(path)  # says what is wrong with it
        raise


def _mistakes(path: Path, error: ValidationError, places: dict[tuple[Any, ...], str]) -> str:
    lines = []
    for one in error.errors():
        keys = tuple(key for key in one["loc"] if key != "[key]")
        where = next((places[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in places), str(path))
        known = StageFile.model_fields if keys[:1] == ("stages",) else CampaignFile.model_fields
        text = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            near = nearest(str(keys[-1]), known)
            text = f"unknown key; did you mean {near}?" if near else f"unknown key; known are {', '.join(known)}"
        lines.append(f"{where}: {'.'.join(map(str, keys))}: {text}")
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes in {path}:", *lines])


def dump_stage(stage: StageFile) -> str:
    """A stage as YAML, for --dry-run."""
    return yaml.safe_dump(stage.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
