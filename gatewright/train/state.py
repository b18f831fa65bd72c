"""A run's state in a checkpoint: what is written, and how a new process takes it up again to the bit."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gatewright.model.adapters import load_adapter, save_adapter
from gatewright.spec.errors import CheckpointError, RunFileError
from gatewright.spec.run import Run
from gatewright.train.optim import optimizer_tensors, restore_optimizer
from gatewright.train.setup import Trainer

RNG_CPU, RNG_CUDA = "rng/cpu", "rng/cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of a run after `step` optimizer steps. They are the data position too: batches are a function of it."""

    step: int
    steps: int
    tokens: int
    target_tokens: int
    best_loss: float | None
    best_step: int | None
    fingerprint: dict[str, str]
    skipped_steps: int = 0
    """Steps of data that a rollback left out: step s takes the data of step s + skipped_steps."""
    guard: dict[str, Any] | None = None
    """What the guard of the router remembers; None for a dense model."""


def write_state(folder: Path, *, trainer: Trainer, run: Run, progress: Progress) -> None:
    """Writes everything a resume needs into a checkpoint folder."""
    if run.method.adapter:
        save_adapter(trainer.model, run.method.adapter, folder / "adapter", base=run.model.path)
    else:
        weights = {name: p.detach().cpu().contiguous() for name, p in trainer.parameters.items()}
        save_file(weights, folder / "weights.safetensors")
    tensors = {f"optimizer/{k}": v for k, v in optimizer_tensors(trainer.optimizer, trainer.parameters).items()}
    if trainer.router:
        tensors |= trainer.router.tensors()
        progress = replace(progress, guard=trainer.router.guard_json())
    tensors[RNG_CPU] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        tensors[RNG_CUDA] = torch.cuda.get_rng_state(trainer.device)
    save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(asdict(progress), indent=2), encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    """The counters of a checkpoint."""
    try:
        return Progress(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'state.json'}: unreadable ({error})") from None


def restore(folder: Path, *, trainer: Trainer, run: Run) -> Progress:
    """Puts weights, optimizer and RNG back; returns the counters. Raises RunFileError if data or base model changed."""
    progress = read_progress(folder)
    for what, then in progress.fingerprint.items():
        now = trainer.fingerprint[what]
        if now != then:
            raise RunFileError(
                f"{folder} was trained on another {what} (fingerprint {then[:12]} then, {now[:12]} now); "
                "restore it, or give this run another name"
            )
    if run.method.adapter:
        load_adapter(trainer.model, folder / "adapter")
    else:
        saved = load_file(folder / "weights.safetensors")
        for name, parameter in trainer.parameters.items():
            parameter.data.copy_(saved[name])
    tensors = load_file(folder / "state.safetensors")
    torch.set_rng_state(tensors.pop(RNG_CPU))
    if RNG_CUDA in tensors:
        cuda_state = tensors.pop(RNG_CUDA)
        if trainer.device.type == "cuda":
            torch.cuda.set_rng_state(cuda_state, trainer.device)
    if trainer.router and progress.guard is not None:
        trainer.router.restore(tensors, progress.guard)
    optimizer = {n.removeprefix("optimizer/"): t for n, t in tensors.items() if n.startswith("optimizer/")}
    restore_optimizer(trainer.optimizer, trainer.parameters, optimizer)
    return progress
