"""The language-model head, taken out of the model so that the loss can apply it to a chunk of tokens at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor
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
        logits_TV = F.linear(hidden_TH, self.weight_VH, self.bias_V)
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        return logits_TV if self.softcap is None else self.softcap * torch.tanh(logits_TV / self.softcap)


def head_of(model: PreTrainedModel) -> Head:
    """The model's head with the scale and soft cap its config declares."""
    linear = model.get_output_embeddings()
    if linear is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    values = model.config.get_text_config().to_dict()
    scale = 1.0 / values["logits_scaling"] if values.get("logits_scaling") else values.get("logit_scale") or 1.0
    scale *= values.get("lm_head_multiplier") or 1.0
    return Head(linear.weight, linear.bias, scale, values.get("final_logit_softcapping"))
