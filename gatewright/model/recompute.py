"""Gradient checkpointing: which layers recompute their activations in the backward pass."""

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gatewright.model.document_lengths import lengths_of, within
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
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block._gradient_checkpointing_func = _on_the_same_documents(block._gradient_checkpointing_func)
    if layers == "selective":
        blocks: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for block in blocks[1::2]:
            block.gradient_checkpointing = False


def _on_the_same_documents(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, running its function again within the document lengths it ran in first."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        lengths = lengths_of({})

        def again(*inner: Any) -> Any:
            with within(lengths):
                return function(*inner)

        return checkpoint(again, *args)

    return run
