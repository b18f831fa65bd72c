"""Two proofs before step 1, on a few tokens: documents don't see each other, and our loss's logits are the model's."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.head import Head
from gatewright.model.roles import is_attention
from gatewright.spec.errors import ModelError
from gatewright.train.forward import decoder, hidden_states, model_inputs

ADVICE = "This architecture cannot be trained on packed documents yet; docs/models.md lists those that can"


@torch.no_grad()
def prove_isolation(model: PreTrainedModel, *, device: torch.device) -> None:
    """Demands of a pack of three documents that none sees another, and that each comes out as from transformers alone.

    Every number of the middle document is made NaN, and the documents around it must stay finite: NaN survives any sum
    or product, so not the smallest weight on another document escapes. (Equal bits would be too much to ask: which
    tokens share an expert decides how its matrix product rounds.) That a document comes out as it does alone in
    transformers' eager attention shows what NaN cannot: positions counted from the beginning of the row, or an
    attention that does more than our seam knows of.
    Raises ModelError where a layer (attention, linear attention, short convolution) looks across the boundary or counts
    over it.
    """
    name, embedding = type(model).__name__, model.get_input_embeddings()
    documents = [[1 + (7 * i) % (embedding.num_embeddings - 1) for i in range(length)] for length in (5, 11, 6)]
    batch = _pack(documents, device)
    try:
        packed_TH = hidden_states(model, batch)
        poison = embedding.register_forward_hook(lambda module, inputs, out: _poisoned(out, 5, 16))
        try:
            poisoned_TH = hidden_states(model, batch)
        finally:
            poison.remove()
        alone = [_alone_in_eager_attention(model, document, device) for document in documents]
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(
            f"{name} cannot run on a packed row: {type(error).__name__}: {str(error).splitlines()[0][:200]}. {ADVICE}"
        ) from error
    if not poisoned_TH[5:16].isnan().all():
        raise ModelError(f"{name} does not carry its input through, so nothing can be proved about it. {ADVICE}")
    for neighbour, rows_TH in (("after", poisoned_TH[:5]), ("before", poisoned_TH[16:])):
        if not rows_TH.isfinite().all():
            raise ModelError(
                f"{name} lets a document see the one packed {neighbour} it: some layer ignores the boundaries "
                f"({_mixers(model)}). {ADVICE}"
            )
    for place, (rows_TH, alone_TH) in enumerate(zip(packed_TH.split(batch.lengths), alone, strict=True), start=1):
        # The median, since in bfloat16 a near tie of the router may send a token elsewhere.
        apart = ((rows_TH - alone_TH).float().norm(dim=1) / alone_TH.float().norm(dim=1)).median().item()
        if not apart <= 0.05:
            raise ModelError(
                f"{name} gives document {place} of a pack other numbers than transformers' eager attention alone "
                f"(relative difference {apart:.2g}): something is counted from the beginning of the row, or attention "
                f"does more than ours ({_mixers(model)}). {ADVICE}"
            )


def _alone_in_eager_attention(model: PreTrainedModel, document: list[int], device: torch.device) -> Tensor:
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return decoder(model)(input_ids=torch.tensor([document], device=device), use_cache=False).last_hidden_state[0]
    finally:
        model.set_attn_implementation(ours)


def _poisoned(out: Tensor, start: int, end: int) -> Tensor:
    out = out.clone()
    out[:, start:end] = float("nan")
    return out


def _mixers(model: PreTrainedModel) -> str:
    """The blocks that mix tokens, by class, for a refusal to name."""
    blocks = {type(m).__name__ for n, m in model.named_modules() if is_attention(n.rpartition(".")[2])}
    return f"token mixers: {', '.join(sorted(blocks)) or 'none known'}"


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
