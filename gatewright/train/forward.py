"""A packed micro-batch through the model: tokens and document boundaries in, final hidden states out."""

from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.head import decoder


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Final hidden states [T, H] of one micro-batch, before the language-model head."""
    return decoder(model)(**model_inputs(batch)).last_hidden_state[0]


def model_inputs(batch: Batch) -> dict[str, object]:
    """The keyword arguments of a transformers forward that carry one micro-batch as a single row of T tokens.

    `use_cache=False` matters: with a cache, transformers 5.24 takes packed positions for one long sequence.
    `document_lengths` is ours: what runs one document at a time need not ask the device for the boundaries.
    """
    longest = max(batch.lengths)
    return {
        "input_ids": batch.tokens_T[None],
        "position_ids": batch.positions_T[None],
        "cu_seq_lens_q": batch.cu_seqlens_S1,
        "cu_seq_lens_k": batch.cu_seqlens_S1,
        "max_length_q": longest,
        "max_length_k": longest,
        "document_lengths": batch.lengths,
        "context": batch.context,
        "use_cache": False,
    }
