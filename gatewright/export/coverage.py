"""Which experts a comparison really used, and how large the adapter's update of each is."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from gatewright.export.deltas import AdapterFiles, LowRank


def expert_coverage(expert_tokens: Mapping[str, list[int]], adapter: AdapterFiles | None) -> dict[str, Any] | None:
    """By layer: experts that got tokens, those that got none, and the share of the update's square in the former.

    None for a dense model.
    """
    if not expert_tokens:
        return None
    sizes = expert_update_sizes(adapter) if adapter else {}
    layers = {}
    for layer, tokens in sorted(expert_tokens.items(), key=lambda item: int(item[0])):
        silent = [expert for expert, count in enumerate(tokens) if not count]
        squares = [size**2 for size in sizes.get(layer, [])]
        entry: dict[str, Any] = {"tokens": tokens, "silent": silent}
        if squares:
            entry["update_norms"] = [float(f"{size:.4g}") for size in sizes[layer]]
            entry["update_checked"] = 1 - sum(squares[e] for e in silent) / (sum(squares) or 1.0)
        layers[layer] = entry
    experts = sum(len(tokens) for tokens in expert_tokens.values())
    return {"experts": experts, "silent": sum(len(layer["silent"]) for layer in layers.values()), "layers": layers}


def expert_update_sizes(adapter: AdapterFiles) -> dict[str, list[float]]:
    """Layer -> Frobenius norm of each expert's update, over all of its weights."""
    squares: dict[str, torch.Tensor] = {}
    for name, low in adapter.low_rank.items():
        found = re.search(r"\.(\d+)\.", name)
        if low.a.dim() == 3 and found:
            layer = found[1]
            squares[layer] = squares.get(layer, torch.zeros(len(low.a))) + _squares(low)
    return {layer: total.sqrt().tolist() for layer, total in squares.items()}


def _squares(low: LowRank) -> torch.Tensor:
    """[E]: ‖scale · B·A‖² = scale² · tr(BᵀB · AAᵀ), without the product of full size."""
    a, b = low.a.float(), low.b.float()
    return (low.scale**2) * ((b.mT @ b) * (a @ a.mT)).sum((1, 2)).clamp(min=0)
