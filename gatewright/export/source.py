"""What is to be exported: a run, an adapter folder or a model folder, and the base model and data that belong to it."""

from dataclasses import dataclass
from pathlib import Path

from gatewright.export.deltas import CONFIG
from gatewright.export.deltas import read_config as read_adapter_config
from gatewright.spec.errors import ModelError, UserError
from gatewright.spec.read import read_run
from gatewright.spec.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A model, or a base model with an adapter."""

    name: str
    base: Path
    """The model to start from; with an adapter, the one it was trained on."""
    adapter: Path | None
    run: Run | None
    run_folder: Path = Path()
    """Where the run lies now, which need not be where its file says."""


def find_source(given: str, *, base: Path | None) -> ExportSource:
    """The source meant by a run's name, folder or run file, or by a folder of an adapter or a model.

    Raises UserError when it is none of these, and when a run has not finished or an adapter's base is not there.
    """
    path = Path(given)
    if path.is_dir() and (path / CONFIG).is_file():
        return _of_adapter(path, base)
    if path.is_dir() and (path / "config.json").is_file():
        if base is not None:
            raise UserError(f"--base is for adapters; {path} is a whole model")
        return ExportSource(name=path.resolve().name, base=path, adapter=None, run=None)
    run_file = path if path.is_file() else next(
        (folder / "run.yaml" for folder in (path, Path("runs") / given) if (folder / "run.yaml").is_file()), None
    )  # fmt: skip
    if run_file is None:
        raise UserError(
            f"{given!r} is no run in runs/, no run file, and no folder with adapter_config.json or config.json"
        )
    run = read_run(run_file)
    folder = run_file.parent if path.is_dir() or run_file.name == "run.yaml" else run.folder
    trained = folder / ("adapter" if run.method.adapter else "model")
    if not trained.is_dir():
        raise UserError(f"{trained}: not there, so this run has not finished; train it to its end first")
    if run.method.adapter is None:
        return ExportSource(name=run.run, base=trained, adapter=None, run=run, run_folder=folder)
    return ExportSource(
        name=run.run, base=_existing(base or Path(run.model.path), trained), adapter=trained, run=run, run_folder=folder
    )


def _of_adapter(folder: Path, base: Path | None) -> ExportSource:
    stated = read_adapter_config(folder).get("base_model_name_or_path")
    if base is None and not stated:
        raise UserError(f"{folder / CONFIG} names no base model; give its folder with --base")
    name = folder.resolve().parent.name if folder.name == "adapter" else folder.resolve().name
    return ExportSource(name=name, base=_existing(base or Path(str(stated)), folder), adapter=folder, run=None)


def _existing(base: Path, adapter: Path) -> Path:
    if not (base / "config.json").is_file():
        raise ModelError(
            f"{base}: no model there, though {adapter} was trained on it; give the folder of the base model with --base"
        )
    return base
