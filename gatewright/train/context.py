"""Context parallelism in a run: what a document costs, batches with their exchange in place, and its proof."""

from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.per_document import describe
from gatewright.packing.cost import ATTENTION_PASSES, BYTES, EXCHANGES, LINEAR_PASSES, CostModel, Rates, cpu_rates
from gatewright.packing.exchange import plan_exchange
from gatewright.packing.schedule import Slice
from gatewright.parallel.context import Moved
from gatewright.parallel.ranks import Ranks
from gatewright.spec.errors import ModelError
from gatewright.train.forward import hidden_states

PROOF_TOKENS = 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of a hidden state, relative to the largest of them: sums are made in another order."""


def costs_of(config: PretrainedConfig, *, rates: Rates | None = None) -> CostModel:
    """Seconds of tokens and of attention, for the balance of a schedule, from the architecture's config.

    Only their ratios steer a schedule; a layer's matrices are counted as attention 4·H² and three of its width.
    """
    reached = rates or cpu_rates()
    text = config.get_text_config()
    values = text.to_dict()
    layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    width = values.get("head_dim") or hidden // heads
    key_heads = values.get("num_key_value_heads") or heads
    chosen = values.get("num_experts_per_tok") or 1
    inner = values.get("moe_intermediate_size") or values.get("intermediate_size") or 4 * hidden
    matrices = 2 * (2 * hidden * width * (heads + key_heads) + 3 * hidden * inner * chosen)
    bounded = sum(kind not in ("full_attention", None) for kind in values.get("layer_types") or [])
    exchange_bytes = EXCHANGES * BYTES * 2 * key_heads * width * layers
    shown = exchange_bytes * (1 - reached.hidden)
    return CostModel(
        token_s=LINEAR_PASSES * layers * matrices / reached.linear_flops_per_s,
        attention_s=ATTENTION_PASSES * (layers - bounded) * 2 * heads * width / reached.attention_flops_per_s,
        near_s=shown / reached.near_bytes_per_s,
        far_s=shown / reached.far_bytes_per_s,
        hop_s=EXCHANGES * layers * reached.hop_s * (1 - reached.hidden),
        slot_s=reached.slot_s,
        ranks_per_node=reached.ranks_per_node,
        tile_tokens=reached.tile_tokens,
        exchange_bytes=exchange_bytes,
    )


def on_device(batch: Batch, ranks: Ranks) -> Batch:
    """The batch on this rank's device, with the exchange of its cut documents in place."""
    placed = batch.to(ranks.device)
    if batch.exchange is None or ranks.alone:
        return placed
    return replace(placed, context=Moved(batch.exchange, ranks.group, device=ranks.device))


@torch.no_grad()
def prove_context(model: PreTrainedModel, ranks: Ranks) -> None:
    """Demands that a document cut over all ranks has the hidden states it has whole.

    Raises ModelError, on every rank, for an architecture with layers that look along a document in another way than
    through the attention seam: linear attention, state spaces, short convolutions, indexers.
    """
    if others := describe(model, ranks.device):
        raise ModelError(
            f"parallel.cp: {type(model).__name__} has layers that carry something along a document past the attention "
            f"seam, and would need the part that another rank holds: {'; '.join(others)}. Set parallel.cp: 1"
        )
    vocab = model.get_input_embeddings().num_embeddings
    length = max(PROOF_TOKENS, 2 * ranks.size)
    tokens_T = torch.tensor([1 + (11 * i) % (vocab - 1) for i in range(length)])
    edges = [length * i // (2 * ranks.size) for i in range(2 * ranks.size + 1)]
    slices = [
        [Slice(0, edges[i], edges[i + 1]) for i in (rank, 2 * ranks.size - 1 - rank)] for rank in range(ranks.size)
    ]
    whole_TH = hidden_states(model, _batch(tokens_T, [Slice(0, 0, length)]).to(ranks.device))
    mine = _batch(tokens_T, slices[ranks.rank])
    cut_TH = hidden_states(model, on_device(replace(mine, exchange=plan_exchange(slices, ranks.rank)), ranks))
    wanted_TH = torch.cat([whole_TH[piece.start : piece.end] for piece in slices[ranks.rank]])
    worst = ((cut_TH - wanted_TH).abs().max() / whole_TH.abs().max()).item()
    if ranks.any(not worst <= TOLERANCE[whole_TH.dtype]):
        raise ModelError(
            f"parallel.cp: {type(model).__name__} gives a document that is cut over ranks other hidden states than a "
            f"whole one (they differ by {worst:.1e}): some layer looks along the row past the attention seam; set "
            "parallel.cp: 1"
        )


def _batch(tokens_T: torch.Tensor, slices: list[Slice]) -> Batch:
    lengths = [piece.end - piece.start for piece in slices]
    return Batch(
        tokens_T=torch.cat([tokens_T[piece.start : piece.end] for piece in slices]),
        labels_T=torch.full((sum(lengths),), -100),
        positions_T=torch.cat([torch.arange(piece.start, piece.end) for piece in slices]),
        cu_seqlens_S1=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=tuple(lengths),
        documents=(0,) * len(slices),
    )
