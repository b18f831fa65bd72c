"""A step whose loss or gradient stopped being a number: its micro-batches are kept, and what is known is said."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from gatewright.data.batch import Batch
from gatewright.parallel.ranks import Ranks
from gatewright.spec.errors import Diverged


def explain_divergence(error: Diverged, folder: Path, batches: list[Batch], *, step: int, ranks: Ranks) -> str:
    """Saves the step's micro-batches (each rank its own) for study and says what is known."""
    name = f"diverged-step-{step:08d}" + ("" if ranks.alone else f"-rank-{ranks.rank}")
    file = folder / f"{name}.safetensors"
    tensors = {}
    for number, batch in enumerate(batches):
        tensors[f"{number}/tokens"] = batch.tokens_T.cpu()
        tensors[f"{number}/labels"] = batch.labels_T.cpu()
        tensors[f"{number}/cu_seqlens"] = batch.cu_seqlens_S1.cpu()
        tensors[f"{number}/documents"] = torch.tensor(batch.documents)
    save_file(tensors, file)
    return (
        f"step {step}: {error}; the weights were not updated. The step's micro-batches are in {file} (tokens, "
        "labels, document numbers). Lower train.lr or train.clip_norm, lengthen train.warmup_steps, or look at those "
        "documents; a restart goes on from the newest checkpoint"
    )
