"""The proof of a resume: what a checkpoint says of the moment it was made, and the same computed after loading it."""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gatewright.data.batch import Batch
from gatewright.spec.errors import CheckpointError
from gatewright.spec.event import ResumeProved
from gatewright.spec.run import Run
from gatewright.train.forward import hidden_states
from gatewright.train.loss import token_loss_sum
from gatewright.train.optim import learning_rate
from gatewright.train.setup import Trainer
from gatewright.train.state import Progress

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest difference of the two losses, relative: kernels may be chosen anew on another node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The moment after `step`, in four numbers that a resume must find again."""

    step: int
    loss: float
    """Of the step's first micro-batch, in evaluation mode, by the weights after the step."""
    lr: float
    batch: str
    """Hash of the step's tokens and labels."""
    rng: str
    """Hash of the random numbers' state."""


def take_proof(trainer: Trainer, run: Run, progress: Progress) -> dict[str, Any] | None:
    """The proof of the present moment, for a checkpoint; None before the first step. No random number is drawn."""
    return asdict(_proof(trainer, run, progress)) if progress.step else None


def prove_resume(trainer: Trainer, run: Run, progress: Progress) -> ResumeProved | None:
    """The loaded moment beside the saved one, as an event; None where the run begins, or an older version saved it.

    Raises CheckpointError where the run would not go on as the one that was saved.
    """
    if progress.proof is None:
        return None
    then, now, tolerance = Proof(**progress.proof), _proof(trainer, run, progress), TOLERANCE[run.model.dtype]
    proved = ResumeProved(
        step=then.step,
        loss_then=then.loss,
        loss_now=now.loss,
        tolerance=tolerance,
        lr_then=then.lr,
        lr_now=now.lr,
        same_data=then.batch == now.batch,
        same_rng=then.rng == now.rng,
    )
    wrong = []
    if not abs(then.loss - now.loss) <= tolerance * max(abs(then.loss), 1e-3):
        wrong.append(f"the loss of its last batch was {then.loss:.6f} and is {now.loss:.6f}")
    if not proved.same_data:
        wrong.append("the data of its last step are others")
    if then.lr != now.lr:
        wrong.append(f"the learning rate of its last step was {then.lr:g} and is {now.lr:g}")
    if wrong:
        raise CheckpointError(
            f"the checkpoint of step {then.step} does not go on as it was saved: {'; '.join(wrong)}. Go on with the "
            "versions and files that the run had, or give this run another name"
        )
    return proved


def _proof(trainer: Trainer, run: Run, progress: Progress) -> Proof:
    batches = trainer.loader.every_rank().step(progress.step - 1 + progress.skipped_steps)
    return Proof(
        step=progress.step,
        loss=_loss(trainer, run, batches[0].to(trainer.device)),
        lr=learning_rate(progress.step - 1, steps=trainer.steps, train=run.train),
        batch=_hash(tensor for batch in batches for tensor in (batch.tokens_T, batch.labels_T)),
        rng=_hash([torch.get_rng_state()]),
    )


@torch.no_grad()
def _loss(trainer: Trainer, run: Run, batch: Batch) -> float:
    """Mean loss of one micro-batch in evaluation mode, so that no dropout draws."""
    trainer.model.eval()
    hidden_TH = hidden_states(trainer.model, batch)
    total = token_loss_sum(hidden_TH, trainer.head, batch.labels_T, chunk_tokens=run.train.loss_chunk_tokens)
    return float(total.item()) / max(1, batch.target_tokens)


def _hash(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
