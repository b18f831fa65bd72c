"""Two proofs before step 1, on a few tokens: documents don't see each other, and our loss's logits are the model's."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.head import Head
from gatewright.spec.errors import ModelError
from gatewright.train.forward import hidden_states, model_inputs


@torch.no_grad()
def prove_isolation(model: PreTrainedModel, *, device: torch.device) -> None:
    """Changes one document of a pack and demands the other's hidden states to stay the same, to the bit.

    Raises ModelError where a layer (attention, linear attention, short convolution) looks across the boundary.
    """
    vocab = model.get_input_embeddings().num_embeddings
    first, second = [1 + i % (vocab - 1) for i in range(3, 14)], [1 + (7 * i) % (vocab - 1) for i in range(5)]
    poisoned = [1 + (token + 11) % (vocab - 1) for token in first]
    clean = _hidden(model, [first, second], device)[len(first) :]
    after = _hidden(model, [poisoned, second], device)[len(first) :]
    if not torch.equal(clean, after):
        moved = (clean - after).abs().max().item()
        raise ModelError(
            f"{type(model).__name__} lets a document see the one packed before it (hidden states moved by {moved:.2g} "
            "when it changed): some layer ignores the boundaries; this architecture cannot train packed"
        )


@torch.no_grad()
def prove_head(model: PreTrainedModel, head: Head, *, device: torch.device) -> None:
    """Demands that our head gives the logits of the model's own forward. Raises ModelError otherwise."""
    vocab = model.get_input_embeddings().num_embeddings
    batch = _pack([[1 + (3 * i) % (vocab - 1) for i in range(7)]], device)
    theirs = model(**model_inputs(batch)).logits[0].float()
    ours = head.logits(hidden_states(model, batch)).float()
    difference = (theirs - ours).abs().max().item()
    if not difference <= 1e-2 * max(1.0, theirs.abs().max().item()):
        raise ModelError(
            f"{type(model).__name__} computes its logits in a way our chunked loss does not know (they differ by "
            f"{difference:.2g}); this architecture cannot be trained yet"
        )


def _hidden(model: PreTrainedModel, documents: list[list[int]], device: torch.device) -> Tensor:
    return hidden_states(model, _pack(documents, device))


def _pack(documents: list[list[int]], device: torch.device) -> Batch:
    lengths = tuple(len(d) for d in documents)
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return Batch(
        tokens_T=torch.tensor([t for d in documents for t in d]),
        labels_T=torch.full((sum(lengths),), -100),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_S1=ends.int(),
        lengths=lengths,
        documents=tuple(range(len(lengths))),
    ).to(device)
