"""What only real values tell of a routing, told or assumed for fake tensors."""

from collections import Counter
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gatewright.model.experts import find_experts
from gatewright.model.routing import Router, find_routers, score_function
from gatewright.model.subset import most_routed, named_experts
from gatewright.spec.errors import ModelError
from gatewright.spec.run import Run

PROBE_TOKENS = 64


def score_functions(model: PreTrainedModel) -> dict[int, str]:
    """Layer -> the function of the logits that its routing weights are made of, found on a copy of it with values.

    Raises ModelError for a router that cannot be watched.
    """
    found: dict[type[nn.Module], str] = {}
    routers = find_routers(model, find_experts(model))
    for router in routers:
        if type(router.module) not in found:
            found[type(router.module)] = _tell(router)
    return {router.layer: found[type(router.module)] for router in routers}


@torch.no_grad()
def _tell(router: Router) -> str:
    with torch.device("cpu"):
        module = _with_values(router.module)
        try:
            weight = module.weight  # perhaps a float32 one, shown in the type that the model computes in
            logits_TE, weights_Tk, index_Tk = module(torch.randn(PROBE_TOKENS, weight.shape[1], dtype=weight.dtype))
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{router.name} is a {type(router.module).__name__}, which does not give (logits, weights, chosen "
                "experts) for hidden states alone: its losses cannot be rehearsed; set router.balance and router.z to 0"
            ) from error
        return score_function(router, logits_TE, weights_Tk, index_Tk)


def _with_values(module: nn.Module) -> nn.Module:
    """A copy in float32 with normal weights, whatever the original is made of."""
    copied = deepcopy(module)
    for part in copied.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    value = _value(tensor)
                    own[name] = nn.Parameter(value, requires_grad=False) if own is part._parameters else value
    return copied


def _value(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5  # logits of about 1, which no function saturates


def assume_experts(run: Run, model: PreTrainedModel) -> dict[int, list[int]] | None:
    """Layer -> experts that get an adapter: those named, or the first ones in place of the most routed; None: all.

    Of ranks that divide the experts, the first is rehearsed: it stands for the one with the most of those named.
    """
    subset = run.method.adapter.experts if run.method.adapter else None
    if subset is None:
        return None
    if subset.layers is not None:
        return _busiest_first(named_experts(model, subset.layers), find_experts(model))
    assert subset.most_routed is not None
    none_routed = {layer: [0] * module.num_experts for layer, module in find_experts(model).items()}
    return most_routed(none_routed, subset.most_routed)


def _busiest_first(chosen: dict[int, list[int]], experts: dict[int, nn.Module]) -> dict[int, list[int]]:
    """The choice with the experts of the rank that has the most of them, and those of the first, exchanged."""
    each = {layer: len(experts[layer].gatewright_held) for layer in chosen}
    ranks = Counter(number // each[layer] for layer, numbers in chosen.items() for number in numbers)
    busiest, _ = max(ranks.items(), key=lambda item: item[1])
    swap = {0: busiest, busiest: 0}
    return {
        layer: sorted((swap.get(n // each[layer], n // each[layer]) * each[layer]) + n % each[layer] for n in numbers)
        for layer, numbers in chosen.items()
    }
