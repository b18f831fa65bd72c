"""The language-model head, taken out of the model so that the loss can apply it to a chunk of tokens at a time."""

from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from transformers import PreTrainedModel

from gatewright.spec.errors import ModelError


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to the head's logits before scale and soft cap: low Bᵀ."""

    low_Tr: Tensor
    """s · dropout(h) Aᵀ, float32."""
    b_Vr: Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """logits = softcap·tanh(scale·(h Wᵀ + b) / softcap), the form that covers the causal LMs of transformers.

    The weights are read from the module at each use, since an adapter or a float32 copy may stand in front of them, and
    gathered where they are divided over ranks.
    """

    linear: nn.Module
    scale: float
    softcap: float | None

    @property
    def weight_VH(self) -> Tensor:
        return whole(self.linear.weight)

    @property
    def bias_V(self) -> Tensor | None:
        return None if self.linear.bias is None else whole(self.linear.bias)

    def low_rank(self, hidden_TH: Tensor) -> LowRankPart | None:
        """The adapter's part for these hidden states; None without an adapter."""
        if not isinstance(self.linear, LoraLayer):
            return None
        [name] = self.linear.active_adapters
        a, b = self.linear.lora_A[name], self.linear.lora_B[name]
        low_Tr = a(self.linear.lora_dropout[name](hidden_TH.to(a.weight.dtype)))
        return LowRankPart(low_Tr * self.linear.scaling[name], whole(b.weight))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[T, V] in the type of the weights."""
        part = self.low_rank(hidden_TH)
        low_Tr, b_Vr = (None, None) if part is None else (part.low_Tr, part.b_Vr)
        return head_logits(hidden_TH, self.weight_VH, self.bias_V, low_Tr, b_Vr, scale=self.scale, softcap=self.softcap)


def head_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    low_Tr: Tensor | None,
    b_Vr: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """[T, V] logits of a head with these weights and, where given, this low-rank part.

    In the type of the weights: some architectures keep the head in float32 whatever the rest is in.
    """
    logits_TV = F.linear(hidden_TH.to(weight_VH.dtype), weight_VH, bias_V)
    if low_Tr is not None and b_Vr is not None:
        logits_TV = (logits_TV + low_Tr @ b_Vr.T).to(logits_TV.dtype)
    if scale != 1.0:
        logits_TV = logits_TV * scale
    return logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)


def whole(weight: Tensor) -> Tensor:
    """The weight; one that is divided over ranks, gathered. Its gradient goes back, summed, to each rank's part."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def gather_on_use(linear: nn.Linear) -> None:
    """Lets a linear layer whose weight may be divided over ranks be called like any other."""

    def forward(hidden_TH: Tensor) -> Tensor:
        return F.linear(hidden_TH, whole(linear.weight), None if linear.bias is None else whole(linear.bias))

    linear.forward = forward  # type: ignore[method-assign]


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its language-model head; for a Llama 4 text model `base_model` names the model itself."""
    return model.base_model if model.base_model is not model else model.model


def head_of(model: PreTrainedModel) -> Head:
    """The model's head with the scale and soft cap its config declares."""
    linear = model.get_output_embeddings()
    if linear is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    values = model.config.get_text_config().to_dict()
    scale = 1.0 / values["logits_scaling"] if values.get("logits_scaling") else values.get("logit_scale") or 1.0
    scale *= values.get("lm_head_multiplier") or 1.0
    return Head(linear, scale, values.get("final_logit_softcapping"))
