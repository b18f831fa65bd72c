"""One optimizer step, top to bottom."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.head import Head
from gatewright.model.routing import count_routing
from gatewright.spec.errors import Diverged
from gatewright.train.forward import hidden_states
from gatewright.train.loss import token_loss_sum
from gatewright.train.optim import Named, set_learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. Times in seconds."""

    loss: float
    grad_norm: float
    tokens: int
    target_tokens: int
    expert_tokens: Tensor | None
    """int64 [MoE layers, E] assignments of this step; None for a dense model."""
    forward_s: float
    backward_s: float
    optimizer_s: float


def train_step(
    model: PreTrainedModel,
    head: Head,
    optimizer: torch.optim.Optimizer,
    parameters: Named,
    batches: list[Batch],
    *,
    lr: float,
    clip_norm: float | None,
    loss_chunk_tokens: int,
) -> StepResult:
    """Runs the micro-batches forward and backward, clips, and updates the weights.

    The loss is the sum over target tokens of all micro-batches divided by their number, so neither the number of
    micro-batches nor what shares one with what changes it. Raises Diverged, before the update, when the loss or the
    gradient norm is not finite.
    """
    clock = stopwatch(batches[0].tokens_T.device)
    target_tokens = sum(batch.target_tokens for batch in batches)
    loss_sum = torch.zeros((), dtype=torch.float64)
    expert_tokens = None
    forward_s = backward_s = 0.0

    model.train()
    optimizer.zero_grad(set_to_none=True)
    for batch in batches:
        started = clock()
        with count_routing() as routing:
            loss = token_loss_sum(hidden_states(model, batch), head, batch.labels_T, chunk_tokens=loss_chunk_tokens)
            between = clock()
            (loss / target_tokens).backward()
        if routing.by_layer:
            counts = routing.stacked()
            expert_tokens = counts if expert_tokens is None else expert_tokens + counts
        loss_sum += loss.detach().double().cpu()
        forward_s += between - started
        backward_s += clock() - between

    started = clock()
    mean_loss = (loss_sum / target_tokens).item()
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    grad_norm = norm.item()
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        raise Diverged(f"loss {mean_loss}, gradient norm {grad_norm}")
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(list(parameters.values()), clip_norm, norm)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    optimizer_s = clock() - started

    return StepResult(
        loss=mean_loss,
        grad_norm=grad_norm,
        tokens=sum(batch.tokens for batch in batches),
        target_tokens=target_tokens,
        expert_tokens=None if expert_tokens is None else expert_tokens.cpu(),
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
    )


def stopwatch(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that waits for the device's queue first, so that a phase's time is its own."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
