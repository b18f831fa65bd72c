"""Which experts get an adapter: the most-routed share of each layer, or those that the run file names."""

import math
from collections.abc import Mapping, Sequence

from torch import nn

from gatewright.model.experts import find_experts
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError


def most_routed(counts: Mapping[int, Sequence[int]], share: float) -> dict[int, list[int]]:
    """Layer -> the ⌈share · E⌉ experts with the most tokens, in rising order; of equals the lower number first.

    `counts`: layer -> tokens that each expert got. What is measured, and on what, is the caller's.
    """
    chosen = {}
    for layer, tokens in counts.items():
        # Rounded first: 0.07 · 100 is a little more than 7 in binary.
        count = math.ceil(round(share * len(tokens), 6))
        order = sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))
        chosen[layer] = sorted(order[:count])
    return chosen


def named_experts(model: nn.Module, layers: Sequence[spec.LayerExperts]) -> dict[int, list[int]]:
    """Layer -> the experts named for it. Raises ModelError for a layer or expert that the model does not have."""
    experts = find_experts(model)
    chosen: dict[int, list[int]] = {}
    for entry in layers:
        where = f"method.adapter.experts.layers: layer {entry.layer}"
        if entry.layer not in experts:
            raise ModelError(f"{where} has no routed experts; those that have: {_ranges(sorted(experts))}")
        if entry.layer in chosen:
            raise ModelError(f"{where} is named twice; write all its experts in one entry")
        count = experts[entry.layer].num_experts
        if wrong := sorted(e for e in entry.experts if e >= count):
            raise ModelError(f"{where} has experts 0 to {count - 1}, not {wrong[0]}")
        chosen[entry.layer] = sorted(set(entry.experts))
    return chosen


def never_routed(counts: Sequence[Sequence[int]], moe_layers: Sequence[int]) -> dict[int, list[int]]:
    """Layer -> experts that got no token, for layers that have any. `counts`: [layer][expert], summed over a run."""
    silent = {
        layer: [expert for expert, tokens in enumerate(row) if tokens == 0]
        for layer, row in zip(moe_layers, counts, strict=True)
    }
    return {layer: experts for layer, experts in silent.items() if experts}


def never_routed_text(silent: Mapping[int, Sequence[int]]) -> str:
    """E.g. `7 experts never got a token in this run, so they did not learn: layer 3: 5, 17; layer 8: 0–4`."""
    total = sum(len(experts) for experts in silent.values())
    layers = "; ".join(f"layer {layer}: {_ranges(experts)}" for layer, experts in silent.items())
    return f"{total} experts never got a token in this run, so they did not learn: {layers}"


def _ranges(numbers: Sequence[int]) -> str:
    """0–4, 7, 9–10."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)
