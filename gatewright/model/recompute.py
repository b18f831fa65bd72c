"""Gradient checkpointing: which layers recompute their activations in the backward pass."""

from typing import Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gatewright.spec.errors import ModelError


def recompute(model: PreTrainedModel, layers: Literal["none", "selective", "full"]) -> None:
    """Sets checkpointing of no layer, of every second layer, or of every layer; always the non-reentrant kind.

    Re-entrant checkpointing runs the first forward without gradients, which hides the router from any loss on it.
    """
    if layers == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"train.checkpointing: {type(model).__name__} supports none; set it to none")
    model.activation_checkpointing_enable({"use_reentrant": False})
    if layers == "selective":
        blocks: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for block in blocks[1::2]:
            block.gradient_checkpointing = False
