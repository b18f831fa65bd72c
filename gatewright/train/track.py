"""Experiment trackers named in the run file; each gets the logged numbers through its own library."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gatewright.spec.errors import UserError
from gatewright.spec.read import dump_run
from gatewright.spec.run import Run


class Tracker(Protocol):
    """What the loop needs of a tracker."""

    def log(self, values: dict[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars under runs/NAME/tensorboard."""

    def __init__(self, run: Run, folder: Path, *, module: Any) -> None:
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("run.yaml", f"```\n{dump_run(run)}\n```")

    def log(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    """Weights & Biases, and Trackio, which has the same functions. The run's name is the tracker's run."""

    def __init__(self, run: Run, folder: Path, *, module: Any) -> None:
        settings = (
            {"resume": "allow", "id": run.run, "dir": str(folder)}
            if module.__name__ == "wandb"
            else {"resume": "allow"}
        )
        self._module = module
        module.init(project="gatewright", name=run.run, config=run.model_dump(mode="json"), **settings)

    def log(self, values: dict[str, float], *, step: int) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()


class MLflow:
    """An MLflow run in the experiment `gatewright`; the server comes from MLFLOW_TRACKING_URI."""

    def __init__(self, run: Run, folder: Path, *, module: Any) -> None:
        self._module = module
        module.set_experiment("gatewright")
        module.start_run(run_name=run.run)
        module.log_text(dump_run(run), "run.yaml")

    def log(self, values: dict[str, float], *, step: int) -> None:
        self._module.log_metrics(values, step=step)

    def close(self) -> None:
        self._module.end_run()


TRACKERS: dict[str, tuple[str, str, Callable[..., Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", TensorBoard),
    "wandb": ("wandb", "wandb", WandbLike),
    "trackio": ("trackio", "trackio", WandbLike),
    "mlflow": ("mlflow", "mlflow", MLflow),
}
"""Name in the run file -> module to import, package to install, our adapter."""


def open_trackers(run: Run, folder: Path) -> list[Tracker]:
    """Opens every tracker of the run. Raises UserError, naming the package, for one whose library is not installed."""
    opened = []
    for name in run.track:
        module, package, adapter = TRACKERS[name]
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"track: {name} needs its own package ({error}): pip install {package}, or take it off the list"
            ) from None
        opened.append(adapter(run, folder, module=imported))
    return opened
