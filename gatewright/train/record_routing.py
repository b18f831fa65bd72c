"""What a router chooses on given documents, counted block by block.

Shapes: T tokens, k choices a token, E experts, L MoE layers, S documents of a batch, R blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gatewright.data.batch import Batch, make_batch
from gatewright.data.view import DocumentView
from gatewright.model.experts import find_experts
from gatewright.router.blocks import BLOCK_TOKENS, RoutingRecord
from gatewright.train.forward import hidden_states


@torch.no_grad()
def record_routing(
    model: PreTrainedModel,
    view: DocumentView,
    documents: Sequence[int],
    *,
    batch_tokens: int,
    device: torch.device,
    block_tokens: int = BLOCK_TOKENS,
) -> RoutingRecord:
    """The routing of these documents of the view, one forward for as many as fit into `batch_tokens`.

    Held at a time: the activations of one layer of one batch, and the counts. Counts are of what the router chose,
    before any capacity takes something away.
    """
    experts = find_experts(model)
    was_training = model.training
    model.eval()
    parts = []
    for group in _groups(view, documents, batch_tokens):
        batch = make_batch(view, group).to(device)
        with _choices(experts) as chosen:
            hidden_states(model, batch)
        parts.append(torch.stack([_block_counts(chosen[layer], batch, experts[layer].num_experts, block_tokens)
                                  for layer in sorted(experts)], dim=1).to(torch.int32).cpu())  # fmt: skip
    model.train(was_training)
    top_k = chosen[min(experts)].shape[1]
    sizes = [_block_sizes(int(view.lengths[number]), block_tokens) for number in documents]
    return RoutingRecord(
        document=np.repeat(np.asarray(documents), [len(size) for size in sizes]),
        block=np.concatenate([np.arange(len(size)) for size in sizes]),
        tokens=np.concatenate(sizes),
        counts=torch.cat(parts).numpy(),
        layers=tuple(sorted(experts)),
        top_k=top_k,
        block_tokens=block_tokens,
    )


def _groups(view: DocumentView, documents: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """The documents in their order, as many together as fit; one that does not fit comes alone."""
    group: list[int] = []
    held = 0
    for number in documents:
        length = int(view.lengths[number])
        if group and held + length > batch_tokens:
            yield group
            group, held = [], 0
        group.append(number)
        held += length
    if group:
        yield group


@contextmanager
def _choices(experts: dict[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Layer index -> chosen experts [T, k] of the forward inside the block, as the experts are given them."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            _, seen[layer], _ = inputs

        return hook

    handles = [module.register_forward_pre_hook(keep(layer)) for layer, module in experts.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _block_counts(index_Tk: Tensor, batch: Batch, experts: int, block_tokens: int) -> Tensor:
    """[R, E] assignments of each block of each document in the batch."""
    sizes = [len(_block_sizes(length, block_tokens)) for length in batch.lengths]
    first_S = torch.tensor([0, *sizes[:-1]]).cumsum(0).to(index_Tk.device)
    lengths_S = torch.tensor(batch.lengths, device=index_Tk.device)
    block_T = first_S.repeat_interleave(lengths_S) + batch.positions_T // block_tokens
    flat = (block_T[:, None] * experts + index_Tk).flatten()
    return torch.bincount(flat, minlength=sum(sizes) * experts).view(-1, experts)


def _block_sizes(length: int, block_tokens: int) -> np.ndarray:
    """Tokens of each block of a document: whole ones, and what is left over."""
    whole, rest = divmod(length, block_tokens)
    return np.array([block_tokens] * whole + [rest] * (rest > 0), dtype=np.int64)
