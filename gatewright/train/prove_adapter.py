"""A proof at the end of a run: the saved adapter, read back from its files, is the trained one and answers the same."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.adapter_files import AdapterFiles, read_adapter
from gatewright.model.head import Head
from gatewright.spec import run as spec
from gatewright.spec.errors import CheckpointError
from gatewright.train.forward import hidden_states

SHOWN_TOKENS = 16


@torch.no_grad()
def prove_written(
    files: AdapterFiles, folder: Path, *, model: PreTrainedModel, adapter: spec.Adapter, base: str
) -> None:
    """Reads the folder that was written and demands the bits of `files`. Raises CheckpointError otherwise."""
    for key, (_, value) in read_adapter(model, adapter, folder, base=base).items():
        if not torch.equal(files.entries[key].tensor, value):
            raise CheckpointError(f"{folder}: a tensor read back differs from the trained one; the disk is not sound")


def prove_reload(
    model: PreTrainedModel, head: Head, adapter: spec.Adapter, folder: Path, *, base: str, batch: Batch
) -> None:
    """Reads the folder into fresh tensors, puts them in the model, and demands the same bits and the same logits.

    The model keeps its own tensors. Raises CheckpointError otherwise.
    """
    model.eval()
    wanted_TV = _logits(model, head, batch)
    trained = []
    for tensor, value in read_adapter(model, adapter, folder, base=base).values():
        if not torch.equal(tensor.detach().cpu(), value):
            raise CheckpointError(f"{folder}: a tensor read back differs from the trained one; the disk is not sound")
        trained.append((tensor, tensor.data))
        tensor.data = value.to(tensor.device, copy=True)
    try:
        got_TV = _logits(model, head, batch)
    finally:
        for tensor, data in trained:
            tensor.data = data
    # Equal tensors; what is left to differ is the order of sums in kernels that do not fix one.
    difference = (got_TV - wanted_TV).abs().max().item()
    if not difference <= 1e-3 * max(1.0, wanted_TV.abs().max().item()):
        raise CheckpointError(f"{folder}: the adapter read back gives other logits (they differ by {difference:.2g})")


def _logits(model: PreTrainedModel, head: Head, batch: Batch) -> Tensor:
    """[≤ 16, V] in float32: all tokens of the micro-batch pass the layers, the first few the head."""
    return head.logits(hidden_states(model, batch)[:SHOWN_TOKENS]).float()
