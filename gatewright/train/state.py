"""A run's state in a checkpoint: what each rank writes, and how other processes, perhaps fewer, take it up again."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatewright.model.adapter_files import AdapterFiles, load_adapter, take_adapter
from gatewright.parallel.collect import whole_adapters
from gatewright.spec.errors import CheckpointError, RunFileError
from gatewright.spec.run import Run
from gatewright.train.eight_bit import codes_of, give_codes, part_of_state, read_moments
from gatewright.train.host import HostCopy
from gatewright.train.optim import optimizer_tensors, restore_optimizer
from gatewright.train.pieces import SavedState, write_pieces
from gatewright.train.save import Write
from gatewright.train.setup import Trainer

RNG_CPU, RNG_CUDA = "rng/cpu", "rng/cuda"
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


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
    proof: dict[str, Any] | None = None
    """The moment it was saved, for the proof of a resume (train/resume.py)."""


def take_state(host: HostCopy, *, trainer: Trainer, run: Run, progress: Progress) -> Write:
    """Copies this rank's part of everything a resume needs; all ranks must call it. Returns what writes the copy.

    Every rank writes the pieces that are its own to save; the first, what all have in common, and the adapter. The
    writing needs no other rank and no device, and may go on while the run does: until the next copy is taken.
    """
    ranks, gradients = trainer.ranks, trainer.gradients
    tensors: dict[str, Tensor] = {RNG_CPU: torch.get_rng_state()}
    if trainer.device.type == "cuda":
        tensors[RNG_CUDA] = torch.cuda.get_rng_state(trainer.device)
    held = [share for share in gradients.shares.values() if share.piece.writes and share.piece.elements]
    adapter: AdapterFiles | None = None
    if run.adapter:
        keep = host.take if ranks.first else None
        with whole_adapters(trainer.model, ranks) as whole:
            adapter = take_adapter(trainer.model, run.adapter, base=run.model.path, host=keep, parts=whole)
    else:
        tensors |= {f"{WEIGHTS}{share.name}": share.owned for share in held}
    parts = {name: share.piece.part for share in held if (name := f"{WEIGHTS}{share.name}") in tensors}
    for share in held:
        for key, tensor in optimizer_tensors(trainer.optimizer, {share.name: share.owned}).items():
            tensors[f"{OPTIMIZER}{key}"] = tensor
            if tensor.dim():
                parts[f"{OPTIMIZER}{key}"] = part_of_state(share, key.rpartition("/")[2])
    if ranks.first and run.train.optimizer == "adamw8bit":
        tensors |= {f"{OPTIMIZER}{key}": code_Q for key, code_Q in codes_of(trainer.optimizer).items()}
    if trainer.router:
        progress = replace(progress, guard=trainer.router.guard_json())
        tensors |= trainer.router.tensors() if ranks.first else {}
    copies = {name: host.take(name, tensor) for name, tensor in tensors.items()}
    counters = json.dumps(asdict(progress), indent=2)

    def write(folder: Path) -> Iterator[Path]:
        if adapter is not None:
            yield from adapter.write(folder / "adapter")
        yield write_pieces(folder, copies, parts=parts, rank=ranks.rank, ranks=ranks.size)
        if ranks.first:
            (folder / "state.json").write_text(counters, encoding="utf-8")
            yield folder / "state.json"

    return write


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
    ranks, gradients, saved = trainer.ranks, trainer.gradients, SavedState(folder)
    if run.adapter:
        with whole_adapters(trainer.model, ranks) as parts:
            load_adapter(trainer.model, run.adapter, folder / "adapter", base=run.model.path, parts=parts)
    with torch.no_grad():
        for share in gradients.shares.values():
            if not run.adapter:
                share.owned.copy_(saved.read(f"{WEIGHTS}{share.name}", share.piece.part).view_as(share.owned))
    gradients.publish()
    _restore_optimizer(saved, trainer, run)
    if trainer.router and progress.guard is not None:
        trainer.router.restore(saved.common("router/"), progress.guard)
    _restore_rng(saved, trainer, run, step=progress.step)
    return progress


def _restore_optimizer(saved: SavedState, trainer: Trainer, run: Run) -> None:
    state: dict[str, Tensor] = {}
    codes: dict[str, Tensor] = {}
    if eight_bit := run.train.optimizer == "adamw8bit":
        codes = codes_of(trainer.optimizer)
        codes |= {f"qmap{n}": saved.whole(f"{OPTIMIZER}qmap{n}") for n in saved.keys(f"{OPTIMIZER}qmap")}
    for share in [share for share in trainer.gradients.shares.values() if share.piece.elements]:
        prefix = f"{OPTIMIZER}{share.name}/"
        if eight_bit:
            found = read_moments(saved, prefix, share, codes)
        else:
            found = {key: saved.read(f"{prefix}{key}", share.piece.part) for key in saved.keys(prefix)}
            found = {key: tensor.view_as(share.owned) if tensor.dim() else tensor for key, tensor in found.items()}
        state |= {f"{share.name}/{key}": tensor for key, tensor in found.items()}
    restore_optimizer(trainer.optimizer, trainer.gradients.owned, state)
    give_codes(trainer.optimizer, {key: code_Q.to(trainer.device) for key, code_Q in codes.items()})


def _restore_rng(saved: SavedState, trainer: Trainer, run: Run, *, step: int) -> None:
    """This rank's generators as they were; on another number of ranks, new ones that depend on seed, step and rank."""
    mine = saved.of_rank(trainer.ranks.rank, "rng/")
    if saved.ranks != trainer.ranks.size or (trainer.device.type == "cuda" and RNG_CUDA not in mine):
        digest = hashlib.sha256(f"{run.train.seed}/{step}/{trainer.ranks.rank}/{trainer.ranks.size}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return
    torch.set_rng_state(mine[RNG_CPU])
    if trainer.device.type == "cuda":
        torch.cuda.set_rng_state(mine[RNG_CUDA], trainer.device)
