"""The language-model head, taken out of the model so that the loss can apply it to a chunk of tokens at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from transformers import PreTrainedModel

from gatewright.spec.errors import ModelError


@dataclass(frozen=True, slots=True)
class Head:
    """logits = softcap·tanh(scale·(h Wᵀ + b) / softcap), the form that covers the causal LMs of transformers."""

    weight_VH: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[T, V] in the type of the weights."""
        logits_TV = F.linear(hidden_TH, whole(self.weight_VH), _whole(self.bias_V))
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        return logits_TV if self.softcap is None else self.softcap * torch.tanh(logits_TV / self.softcap)


def whole(weight: Tensor) -> Tensor:
    """The weight; one that is divided over ranks, gathered. Its gradient goes back, summed, to each rank's part."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def gather_on_use(head: nn.Linear) -> None:
    """Lets a head whose weight is divided over ranks be called like any other."""
    head.forward = lambda hidden_TH: F.linear(hidden_TH, whole(head.weight), _whole(head.bias))  # type: ignore[method-assign]


def _whole(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else whole(bias)


def head_of(model: PreTrainedModel) -> Head:
    """The model's head with the scale and soft cap its config declares."""
    linear = model.get_output_embeddings()
    if linear is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    values = model.config.get_text_config().to_dict()
    scale = 1.0 / values["logits_scaling"] if values.get("logits_scaling") else values.get("logit_scale") or 1.0
    scale *= values.get("lm_head_multiplier") or 1.0
    return Head(linear.weight, linear.bias, scale, values.get("final_logit_softcapping"))
