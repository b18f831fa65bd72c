"""What the verb `router` prints: the answer first, then the numbers it rests on, in at most 100 columns."""

from collections.abc import Sequence

import numpy as np

from gatewright.router.blocks import RoutingRecord
from gatewright.router.capacity import CONFIDENCE, CapacityEstimate, Question
from gatewright.router.health import count_health

WIDTH = 100


def measure_text(record: RoutingRecord, *, path: str) -> str:
    """What was recorded: documents, their lengths, and how even each layer's load is."""
    health = count_health(record.loads().tolist())
    lengths = np.bincount(np.unique(record.document, return_inverse=True)[1], weights=record.tokens).astype(int)
    lines = [
        f"Routing of {record.documents:,} documents recorded in {path}",
        "",
        f"documents   {lengths.sum():,} tokens; median {int(np.median(lengths)):,}, longest {lengths.max():,}",
        f"router      {len(record.layers)} layers of {record.experts} experts, top-{record.top_k}",
        f"blocks      {record.block_tokens} tokens; what is left over at a document's end is a block too",
        "",
        "layer   load CV   MaxVio   effective experts   dead   starved",
    ]
    lines += [
        f"{layer:>5}   {cv:7.2f}   {violation:6.2f}   {effective:17.0%}   {dead:4d}   {starved:7d}"
        for layer, cv, violation, effective, dead, starved in zip(
            record.layers, health.load_cv, health.max_violation, health.effective_experts, health.dead, health.starved,
            strict=True,
        )
    ]  # fmt: skip
    return "\n".join(lines)


def capacity_text(
    estimate: CapacityEstimate, question: Question, *, experts: int, asked: tuple[float, float, float] | None = None
) -> str:
    """The factor to set. asked: a factor of the user's, its drop, and its drop with an endless pool."""
    groups = question.groups(experts)
    if estimate.upper >= groups:
        answer = f"No capacity factor below {groups} keeps drops under {question.drop:.2%}: stay dropless"
    else:
        answer = f"Capacity factor {_up(estimate.upper):.2f} per {question.per} keeps drops under {question.drop:.2%}"
    context = f"{question.documents} × {question.tokens:,} tokens a rank"
    if question.packed:
        context = f"packs of {question.tokens:,} tokens"
    if question.per == "rank":
        context += f", pooled over {question.ep} ranks"
    lines = [
        answer,
        "",
        f"for         {context}",
        "drops       mean share of assignments, in the layer that drops most",
        f"estimate    {estimate.factor:.2f}, layer {estimate.layer}; the answer is its {CONFIDENCE:.0%} upper bound",
        f"rests on    {_basis(estimate, question)}",
        f"floor       {estimate.floor:.2f}: no length of context and no pool makes less enough",
        f"i.i.d.      {estimate.independent:.2f} if tokens were independent; drops {estimate.independent_drop:.1%}",
    ]
    if asked:
        factor, drop, endless = asked
        lines.append(f"yours       {factor:g} drops {drop:.1%}, and {endless:.1%} with an endless pool")
    lines += ["", f"layer   factor   floor   (1 is the fair share of {_group(question, experts)})"]
    lines += [f"{layer.layer:>5}   {layer.factor:6.2f}   {layer.floor:5.2f}" for layer in estimate.layers]
    return "\n".join(lines)


def placement_text(
    layers: Sequence[int],
    before: Sequence[float],
    after: Sequence[float],
    elsewhere: Sequence[float],
    *,
    ep: int,
    documents: int,
) -> str:
    """Load of each layer's busiest rank over the mean; elsewhere: placed by half of the documents, loaded by others."""
    mean = [sum(values) / len(values) for values in (before, after, elsewhere)]
    lines = [
        f"Busiest of {ep} ranks, mean of {len(layers)} layers: {mean[0]:.2f} → {mean[1]:.2f} times the fair load",
        "",
        f"rests on    {documents:,} documents",
        f"elsewhere   {mean[2]:.2f}: placed by every second document, loaded by the others",
        "",
        "layer   contiguous → placed   elsewhere",
    ]
    lines += [
        f"{layer:>5}   {now:10.2f} → {then:4.2f}     {other:9.2f}"
        for layer, now, then, other in zip(layers, before, after, elsewhere, strict=True)
    ]
    return "\n".join(lines)


def _up(factor: float) -> float:
    """Rounded up to two digits, so that what is read off keeps the bound."""
    return float(np.ceil(factor * 100 - 1e-9)) / 100


def _basis(estimate: CapacityEstimate, question: Question) -> str:
    if estimate.method == "packs":
        return f"{estimate.documents} documents of at most {estimate.longest_tokens:,} tokens, drawn to fill packs"
    if estimate.method == "bootstrap":
        return (
            f"{estimate.documents} documents that are long enough, drawn in runs of {estimate.longest_tokens:,} tokens"
        )
    return (
        f"runs of {estimate.longest_tokens:,} tokens of {estimate.documents} documents, carried on to "
        f"{question.tokens:,} by V(L) = τ² + a·L^-β"
    )


def _group(question: Question, experts: int) -> str:
    if question.per == "expert":
        return "an expert"
    return f"a rank of {experts // question.ep} experts"
