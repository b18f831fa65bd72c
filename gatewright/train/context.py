"""Context parallelism in a run: what a document costs, batches with their exchange in place, and its proof."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from transformers import PretrainedConfig, PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.data.loader import Cut, Loader
from gatewright.data.view import DocumentView
from gatewright.model.attention_blocks import flash_error
from gatewright.model.per_document import describe
from gatewright.packing.cost import (
    BYTES,
    EXCHANGES,
    LINEAR_PASSES,
    CostModel,
    Rates,
    device_rates,
    read_rates,
)
from gatewright.packing.exchange import Exchange
from gatewright.packing.exchange_cost import Heads, Name
from gatewright.packing.exchange_gather import Gather
from gatewright.packing.exchange_heads import HeadExchange
from gatewright.packing.exchange_plan import Plan, plan
from gatewright.packing.exchange_ring import RingExchange
from gatewright.packing.flops import ATTENTION_PASSES
from gatewright.packing.schedule import Slice
from gatewright.parallel.context import Context, Gathered, Moved
from gatewright.parallel.context_heads import HeadsDealt
from gatewright.parallel.context_ring import Ring
from gatewright.parallel.groups import aligned_sizes
from gatewright.parallel.ranks import Ranks
from gatewright.spec.auto import AUTO_MICRO_BATCH_TOKENS
from gatewright.spec.errors import ModelError, RunFileError
from gatewright.spec.event import Finding
from gatewright.spec.run import Parallel, Run
from gatewright.train.device import device_name
from gatewright.train.forward import hidden_states

AUTOMATIC: tuple[Name, ...] = ("moved", "gathered", "heads")
PROOF_TOKENS = 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of a hidden state, relative to the largest of them: sums are made in another order."""


def context_parallel(run: Run) -> bool:
    return isinstance(run.parallel, Parallel) and run.parallel.cp != 1


def cut_of(run: Run, view: DocumentView, config: PretrainedConfig, *, ranks: Ranks) -> Cut | None:
    """How documents are cut over ranks; None without context parallelism. Raises RunFileError where it cannot be."""
    if not context_parallel(run):
        return None
    assert isinstance(run.parallel, Parallel)
    longest, step, wanted = int(view.lengths.max()), run.train.tokens_per_step, run.train.micro_batch_tokens
    if longest > step:
        raise RunFileError(
            f"train.tokens_per_step = {step:,} cannot hold the longest document of {longest:,} tokens; raise it, or "
            "lower data.max_tokens"
        )
    capacity = max(AUTO_MICRO_BATCH_TOKENS, -(-longest // ranks.size)) if wanted == "auto" else wanted
    if longest > ranks.size * capacity:
        raise RunFileError(
            f"train.micro_batch_tokens = {capacity:,} on {ranks.size} ranks cannot hold the longest document of "
            f"{longest:,} tokens; raise it to {-(-longest // ranks.size):,}, take more ranks, or lower data.max_tokens"
        )
    size = run.parallel.cp if isinstance(run.parallel.cp, int) else None
    heads, rates = heads_of(config), rates_of(run.parallel, ranks)
    if run.parallel.exchange == "heads":
        refuse_heads(heads, ranks=ranks.size, size=size)
    return Cut(
        capacity=capacity,
        costs=costs_of(config, rates=rates),
        size=size,
        heads=heads,
        rates=rates,
        exchanges=exchanges_of(run.parallel.exchange),
    )


def rates_of(parallel: Parallel, ranks: Ranks) -> Rates:
    """What the machine reaches: as probed, where the run file names a probe, else the catalogue's for the device.

    Rank 0's answer for all, since schedules must agree. Raises UserError for a file without measured costs.
    """
    probed = read_rates(Path(parallel.probe)) if parallel.probe and ranks.first else None
    rates: Rates = ranks.tell(probed or device_rates(device_name(ranks.device)))
    return rates


def costs_of(config: PretrainedConfig, *, rates: Rates) -> CostModel:
    """Seconds of tokens and of attention, for the balance of a schedule, from the architecture's config.

    Only their ratios steer a schedule; a layer's matrices are counted as attention 4·H² and three of its width.
    """
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
    shown = exchange_bytes * (1 - rates.hidden)
    return CostModel(
        token_s=LINEAR_PASSES * layers * matrices / rates.linear_flops_per_s,
        attention_s=ATTENTION_PASSES * (layers - bounded) * 2 * heads * width / rates.attention_flops_per_s,
        near_s=shown / rates.near_bytes_per_s,
        far_s=shown / rates.far_bytes_per_s,
        hop_s=EXCHANGES * layers * rates.hop_s * (1 - rates.hidden),
        slot_s=rates.slot_s,
        ranks_per_node=rates.ranks_per_node,
        tile_tokens=rates.tile_tokens,
        exchange_bytes=exchange_bytes,
    )


def heads_of(config: PretrainedConfig) -> Heads:
    """Widths of the attention of a layer; without query heads where they may differ between layers."""
    text = config.get_text_config()
    values = text.to_dict()
    query_heads = text.num_attention_heads
    key_heads = values.get("num_key_value_heads") or query_heads
    width = values.get("head_dim") or text.hidden_size // query_heads
    latent = values.get("kv_lora_rank") is not None  # keys and values of every query head are exchanged
    uneven = [key for key in values if "attention_heads_per" in key or key.startswith("num_global_")]
    return Heads(
        query_heads=None if uneven else query_heads,
        key_heads=query_heads if latent else key_heads,
        qk_dim=values["qk_nope_head_dim"] + values["qk_rope_head_dim"] if latent else width,
        v_dim=values["v_head_dim"] if latent else width,
    )


def exchanges_of(wanted: str) -> tuple[Name, ...]:
    """What a run may choose from. The ring's attention is written out, so it is taken only where it is asked for."""
    return AUTOMATIC if wanted == "auto" else tuple(name for name in get_args(Name) if name == wanted)


def refuse_heads(heads: Heads, *, ranks: int, size: int | None) -> None:
    """Raises RunFileError where heads can be dealt in no micro-batch; `size`: the ranks of every document, if given."""
    if heads.query_heads is None:
        raise RunFileError(
            "parallel.exchange: heads cannot be: the layers have different numbers of query heads; set auto, moved, "
            "gathered or ring"
        )
    sizes = [size] if size else aligned_sizes(ranks)
    if ranks > 1 and all(heads.query_heads % wanted for wanted in sizes):
        raise RunFileError(
            f"parallel.exchange: heads cannot be: {heads.query_heads} query heads cannot be dealt evenly to groups of "
            f"{' or '.join(map(str, sizes))} ranks; set auto, moved, gathered or ring"
        )


def fallback(wanted: str, heads: Heads, made: dict[str, int]) -> Finding | None:
    """What a run that asks for one exchange must be told when micro-batches of a step made another."""
    others = {name: count for name, count in made.items() if name != "whole" and name.split()[0] != wanted}
    if wanted == "auto" or not others:
        return None
    shown = ", ".join(f"{name} × {count}" for name, count in others.items())
    return Finding(
        severity="warning",
        text=f"parallel.exchange: {wanted} is not what all micro-batches make ({shown}): the smallest aligned groups "
        f"that share their documents have numbers of ranks that do not divide the {heads.query_heads} query heads. "
        "Each step's event says what was made",
    )


def exchanges_line(loader: Loader) -> str:
    """E.g. `exchange  in step 1: heads over 2 × 3, whole × 1`: micro-batches by what they make; empty without any."""
    if loader.cut is None or loader.ranks == 1:
        return ""
    return "exchange  in step 1: " + ", ".join(f"{name} × {count}" for name, count in loader.exchanges(0).items())


def on_device(batch: Batch, ranks: Ranks) -> Batch:
    """The batch on this rank's device, with the exchange of its cut documents in place."""
    placed = batch.to(ranks.device)
    if batch.exchange is None or ranks.alone:
        return placed
    return replace(placed, context=context_of(batch.exchange, ranks))


def context_of(plan: Plan, ranks: Ranks) -> Context:
    """The exchange over the group it was planned for."""
    if isinstance(plan, Exchange):
        return Moved(plan, ranks.group, device=ranks.device)
    assert ranks.pool is not None
    group = ranks.pool.of(plan.size)
    match plan:
        case Gather():
            return Gathered(plan, group, device=ranks.device)
        case HeadExchange():
            return HeadsDealt(plan, group, device=ranks.device)
        case RingExchange():
            return Ring(plan, group, device=ranks.device)


@torch.no_grad()
def prove_context(model: PreTrainedModel, ranks: Ranks, *, exchanges: Sequence[Name] = ("moved",)) -> None:
    """Demands that a document cut over all ranks has the hidden states it has whole, with each of these exchanges.

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
    whole_TH = hidden_states(model, _batch(tokens_T, [Slice(0, 0, length)]).to(ranks.device))
    heads = heads_of(model.config)
    if "ring" in exchanges:
        _prove_ring(heads, dtype=whole_TH.dtype, ranks=ranks)
    for name in dict.fromkeys(("moved", *exchanges)):
        # Heads are dealt to as many ranks as divide them; each such group then has a document of its own.
        size = ranks.size if name != "heads" else _most_ranks(heads, ranks.size)
        if size == 1:
            continue
        slices = _cut_over(size, ranks.size, length)
        mine = _batch(tokens_T, slices[ranks.rank])
        cut_TH = hidden_states(model, on_device(replace(mine, exchange=plan(slices, ranks.rank, (name, size))), ranks))
        wanted_TH = torch.cat([whole_TH[piece.start : piece.end] for piece in slices[ranks.rank]])
        worst = ((cut_TH - wanted_TH).abs().max() / whole_TH.abs().max()).item()
        if ranks.any(not worst <= TOLERANCE[whole_TH.dtype]):
            raise ModelError(
                f"parallel.cp: {type(model).__name__} gives a document that is cut over ranks other hidden states than "
                f"a whole one (exchange {name}; they differ by {worst:.1e}): some layer looks along the row past the "
                "attention seam; set parallel.cp: 1"
            )


def _prove_ring(heads: Heads, *, dtype: torch.dtype, ranks: Ranks) -> None:
    """Its kernels are called below torch's public interface: what they make is held to the formula."""
    worst = flash_error(
        query_heads=heads.query_heads or heads.key_heads, key_heads=heads.key_heads,
        widths=(heads.qk_dim, heads.v_dim), dtype=dtype, device=ranks.device,
    )  # fmt: skip
    if ranks.any(not worst <= TOLERANCE[dtype]):
        raise ModelError(
            f"parallel.exchange: ring: torch's flash attention gives other outputs or gradients than its formula on "
            f"this device (they differ by {worst:.1e}); set auto, moved, gathered or heads"
        )


def _most_ranks(heads: Heads, ranks: int) -> int:
    """Of the largest aligned groups that query heads can be dealt to; 1: none."""
    divides = [size for size in aligned_sizes(ranks) if heads.query_heads and heads.query_heads % size == 0]
    return max(divides, default=1)


def _cut_over(size: int, ranks: int, length: int) -> list[list[Slice]]:
    """[ranks] of each: one document for each group of this size, cut in mirrored chunks."""
    edges = [length * i // (2 * size) for i in range(2 * size + 1)]
    return [
        [Slice(rank // size, edges[i], edges[i + 1]) for i in (rank % size, 2 * size - 1 - rank % size)]
        for rank in range(ranks)
    ]


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
