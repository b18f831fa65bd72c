"""`router measure`: what a run's router chooses on its own training documents, as a record in the run folder."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from gatewright.model.adapter_files import load_adapter
from gatewright.router.blocks import FILE, RoutingRecord, write_record
from gatewright.spec.errors import ModelError
from gatewright.spec.event import Event
from gatewright.spec.run import Run
from gatewright.train.record_routing import record_routing
from gatewright.train.setup import set_up


def measure_run(
    run: Run, *, documents: int, trained: bool = False, log: Callable[[Event], None]
) -> tuple[Path, RoutingRecord]:
    """Records the routing of `documents` training documents, drawn by the run's seed, in the run folder.

    trained: with the run's finished result instead of its base model. Raises ModelError for a dense model, and for a
    result that is not there.
    """
    if trained and run.method.adapter is None:
        run = run.model_copy(update={"model": run.model.model_copy(update={"path": str(run.folder / "model")})})
    trainer = set_up(run, log=log)
    if not trainer.moe_layers:
        raise ModelError(f"{run.model.path}: a dense model; it has no router to measure")
    if trained and run.adapter is not None:
        load_adapter(trainer.model, run.adapter, run.folder / "adapter", base=run.model.path)
    view = trainer.loader.view
    chosen = np.random.default_rng(run.train.seed).permutation(len(view))[:documents]
    record = record_routing(
        trainer.model,
        view,
        np.sort(chosen).tolist(),
        batch_tokens=trainer.loader.plan.capacity,
        device=trainer.device,
    )
    write_record(record, run.folder / FILE)
    return run.folder / FILE, record
