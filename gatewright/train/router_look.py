"""A look at the router: a fixed probe batch through the model, and how its routing differs from that of step 0.

Shapes: T tokens, k choices a token, E experts, S documents.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.batch import Batch, make_batch
from gatewright.data.loader import Loader
from gatewright.model.routing import RouterWatch, Seen
from gatewright.router.health import LEAST_INFLATION, count_health, variance_inflation
from gatewright.spec.event import RouterHealth
from gatewright.train.forward import hidden_states

COST = 0.04
"""Probe tokens over the tokens trained between two looks, at most. A look is a forward pass, at most half the cost of
training on a token: 2 % of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Step 0: the routers' weights, and the routing of each probe micro-batch, by layer; on the CPU."""

    weights: dict[int, Tensor]
    scores_TE: list[dict[int, Tensor]]
    index_Tk: list[dict[int, Tensor]]
    counts_LE: Tensor
    """int64: assignments over the whole probe."""
    inflation: float
    """Variance of a document's expert shares over that of independent tokens, in the layer where it is largest."""


def probe_batches(loader: Loader, *, tokens: int, seed: int) -> list[Batch]:
    """Micro-batches of documents drawn once by `seed`, up to `tokens` in all, and one document at least."""
    order = np.random.default_rng(seed).permutation(len(loader.view.lengths))
    packs: list[list[int]] = [[]]
    total = held = 0
    for number in order.tolist():
        length = int(loader.view.lengths[number])
        if total and total + length > tokens:
            continue
        if held and held + length > loader.plan.capacity:
            packs.append([])
            held = 0
        packs[-1].append(number)
        total, held = total + length, held + length
        if total >= tokens:
            break
    return [make_batch(loader.view, pack) for pack in packs]


@torch.no_grad()
def first_look(model: PreTrainedModel, watch: RouterWatch, probe: list[Batch]) -> tuple[RouterHealth, Reference]:
    """The look before training, and what later looks are compared with."""
    began = time.perf_counter()
    seen = [_routing(model, watch, batch) for batch in probe]
    reference = Reference(
        weights={r.layer: r.weight.detach().float().cpu().clone() for r in watch.routers},
        scores_TE=[{layer: s.scores_TE.cpu() for layer, s in one.items()} for one in seen],
        index_Tk=[{layer: s.index_Tk.cpu() for layer, s in one.items()} for one in seen],
        counts_LE=torch.stack([_counts(seen, router.layer) for router in watch.routers]).cpu(),
        inflation=_inflation(seen, probe),
    )
    return _health(watch, probe, seen, reference, step=0, began=began), reference


@torch.no_grad()
def look(
    model: PreTrainedModel, watch: RouterWatch, probe: list[Batch], reference: Reference, *, step: int
) -> RouterHealth:
    """The routing of the probe after `step` steps against that of step 0."""
    began = time.perf_counter()
    seen = [_routing(model, watch, batch) for batch in probe]
    return _health(watch, probe, seen, reference, step=step, began=began)


def _routing(model: PreTrainedModel, watch: RouterWatch, batch: Batch) -> dict[int, Seen]:
    was_training = model.training
    model.eval()
    watch.recording, watch.seen = True, {}
    try:
        hidden_states(model, batch)
    finally:
        watch.recording = False
        model.train(was_training)
    seen, watch.seen = watch.seen, {}
    return seen


def _health(
    watch: RouterWatch,
    probe: list[Batch],
    seen: list[dict[int, Seen]],
    reference: Reference,
    *,
    step: int,
    began: float,
) -> RouterHealth:
    tokens = sum(batch.tokens for batch in probe)
    rows = []
    for router in watch.routers:
        sums = [
            _sums(one[router.layer], scores_TE[router.layer], index_Tk[router.layer])
            for one, scores_TE, index_Tk in zip(seen, reference.scores_TE, reference.index_Tk, strict=True)
        ]
        rows.append((torch.stack(sums).sum(dim=0) / tokens).tolist())
    entropy, top1, margin, lse2, overlap, kl = map(list, zip(*rows, strict=True))
    counts = count_health([_counts(seen, router.layer).tolist() for router in watch.routers])
    return RouterHealth(
        step=step,
        tokens=tokens,
        load_cv=counts.load_cv,
        max_violation=counts.max_violation,
        effective_experts=counts.effective_experts,
        dead=counts.dead,
        starved=counts.starved,
        token_entropy=entropy,
        top1=top1,
        margin=margin,
        lse2=lse2,
        drift=[_drift(router.weight, reference.weights[router.layer]) for router in watch.routers],
        overlap=overlap,
        kl=kl,
        seconds=time.perf_counter() - began,
    )


def _sums(now: Seen, scores_0_TE: Tensor, index_0_Tk: Tensor) -> Tensor:
    """float64 [6]: sums over tokens of entropy / ln E, largest p, margin, logsumexp², overlap, KL(step 0 || now)."""
    scores_TE, (choices, experts) = now.scores_TE, (now.index_Tk.shape[1], now.scores_TE.shape[1])
    scores_0_TE, index_0_Tk = scores_0_TE.to(scores_TE.device), index_0_Tk.to(scores_TE.device)
    top_T = scores_TE.topk(min(choices + 1, experts), dim=1).values
    margin_T = top_T[:, choices - 1] - top_T[:, -1]
    log_TE, log_0_TE = scores_TE.clamp(min=1e-30).log(), scores_0_TE.clamp(min=1e-30).log()
    entropy_T = -(scores_TE * log_TE).sum(dim=1) / math.log(experts)
    same_T = (now.index_Tk[:, :, None] == index_0_Tk[:, None, :]).any(dim=2).double().mean(dim=1)
    kl_T = (scores_0_TE * (log_0_TE - log_TE)).sum(dim=1)
    lse2_T = now.logits_TE.float().logsumexp(dim=1).square()
    columns = (entropy_T, top_T[:, 0], margin_T, lse2_T, same_T, kl_T)
    return torch.stack([column.double().sum() for column in columns]).cpu()


def _counts(seen: list[dict[int, Seen]], layer: int) -> Tensor:
    """int64 [E]: assignments over the whole probe."""
    experts = seen[0][layer].scores_TE.shape[1]
    return torch.stack([torch.bincount(one[layer].index_Tk.flatten(), minlength=experts) for one in seen]).sum(dim=0)


def _drift(weight: Tensor, weight_0: Tensor) -> float:
    now = weight.detach().float().cpu()
    return ((now - weight_0).norm() / weight_0.norm().clamp(min=1e-30)).item()


def _inflation(seen: list[dict[int, Seen]], probe: list[Batch]) -> float:
    """The largest over layers; for a probe of a single document, which tells nothing, the smallest we ever measured."""
    if sum(len(batch.lengths) for batch in probe) < 2:
        return LEAST_INFLATION
    worst = 1.0
    for layer in seen[0]:
        experts = seen[0][layer].scores_TE.shape[1]
        counts = [
            torch.bincount(rows.flatten(), minlength=experts)
            for one, batch in zip(seen, probe, strict=True)
            for rows in one[layer].index_Tk.split(list(batch.lengths))
        ]
        worst = max(worst, variance_inflation(torch.stack(counts).cpu().numpy()) or 1.0)
    return worst
