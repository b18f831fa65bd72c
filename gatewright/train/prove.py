"""Two proofs before step 1, on a few tokens: documents don't see each other, and our loss's logits are the model's."""

import torch
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.head import Head
from gatewright.spec.errors import ModelError
from gatewright.train.forward import hidden_states, model_inputs


@torch.no_grad()
def prove_isolation(model: PreTrainedModel, *, device: torch.device) -> None:
    """Makes every number of one document of a pack NaN and demands that the documents around it stay finite.

    NaN survives any sum or product, so not the smallest weight on another document escapes. (Equal bits would be too
    much to ask: which tokens share an expert decides how its matrix product rounds.)
    Raises ModelError where a layer (attention, linear attention, short convolution) looks across the boundary.
    """
    vocab = model.get_input_embeddings().num_embeddings
    batch = _pack([[1 + (7 * i) % (vocab - 1) for i in range(length)] for length in (5, 11, 6)], device)
    embedded_TH = model.get_input_embeddings()(batch.tokens_T)
    embedded_TH[5:16] = float("nan")
    inputs = model_inputs(batch) | {"input_ids": None, "inputs_embeds": embedded_TH[None]}
    hidden_TH = model.base_model(**inputs).last_hidden_state[0]
    if not hidden_TH[5:16].isnan().all():
        raise ModelError(f"{type(model).__name__} does not carry its input through, so nothing can be proved about it")
    for neighbour, rows_TH in (("after", hidden_TH[:5]), ("before", hidden_TH[16:])):
        if not rows_TH.isfinite().all():
            raise ModelError(
                f"{type(model).__name__} lets a document see the one packed {neighbour} it: "
                "some layer ignores the boundaries; this architecture cannot train on packed documents"
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
