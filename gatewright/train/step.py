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
from gatewright.parallel.collectives import METER
from gatewright.parallel.gradients import Gradients
from gatewright.spec.errors import Diverged
from gatewright.train.forward import hidden_states
from gatewright.train.loss import token_loss_sum
from gatewright.train.optim import set_learning_rate
from gatewright.train.router_loss import RouterLoss, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did, on all ranks together. Times in seconds, of this rank."""

    loss: float
    grad_norm: float
    tokens: int
    target_tokens: int
    expert_tokens: Tensor | None
    """int64 [MoE layers, E] assignments of this step; None for a dense model."""
    dropped: Tensor | None
    """int64 [MoE layers] assignments dropped for want of capacity."""
    balance_loss: float | None
    z_loss: float | None
    """The router's own losses before their weights; None where they are off."""
    forward_s: float
    backward_s: float
    optimizer_s: float
    wait_s: float
    """Of these, in collectives; in the sum of the step's tokens before them too."""


def train_step(
    model: PreTrainedModel,
    head: Head,
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    batches: list[Batch],
    *,
    lr: float,
    clip_norm: float | None,
    loss_chunk_tokens: int,
    router: RouterLoss | None = None,
    router_scale: float = 1.0,
    before_each: Callable[[], object] | None = None,
) -> StepResult:
    """Runs the micro-batches forward and backward, clips, and updates the weights.

    The loss is the sum over target tokens of all micro-batches divided by their number, so neither the number of
    micro-batches nor what shares one with what changes it. `router`: losses of the router's own, beside it;
    `router_scale`: the router's learning rate over `lr`. `before_each`: called before each micro-batch; what it raises
    ends the step, the weights unchanged. Raises Diverged, before the update, when the loss or the gradient norm is not
    finite.
    """
    clock = stopwatch(batches[0].tokens_T.device)
    ranks = gradients.ranks
    METER.take_s()
    # Here and below, what is summed is summed over all ranks: every number of the step is that of one process.
    counted = ranks.sum(torch.tensor([[batch.tokens, batch.target_tokens] for batch in batches]).sum(dim=0))
    tokens, target_tokens = counted.tolist()
    loss_sum = torch.zeros((), dtype=torch.float64)
    expert_tokens = dropped = None
    balance_loss = z_loss = None
    forward_s = backward_s = 0.0
    if router is not None and router.wants_share:
        router.share_LE = shares(ranks.sum(count_routes(model, batches)))

    model.train()
    gradients.clear()
    if router is not None and router.on:
        router.begin_step(step_tokens=tokens)
    for number, batch in enumerate(batches, start=1):
        if before_each is not None:
            before_each()
        started = clock()
        if router is not None and router.on:
            router.begin(batch)
        gradients.micro_batch(last=number == len(batches))
        with count_routing() as routing:
            loss = token_loss_sum(hidden_states(model, batch), head, batch.labels_T, chunk_tokens=loss_chunk_tokens)
            between = clock()
            (loss / target_tokens).backward()
        gradients.finish()
        if routing.by_layer:
            counts, drops = routing.stacked() * batch.counts, routing.stacked_drops() * batch.counts
            expert_tokens = counts if expert_tokens is None else expert_tokens + counts
            dropped = drops if dropped is None else dropped + drops
        if router is not None and router.on:
            router.end()
        loss_sum += loss.detach().double().cpu()
        forward_s += between - started
        backward_s += clock() - between

    started = clock()
    if expert_tokens is not None and dropped is not None:
        expert_tokens, dropped = ranks.sum(expert_tokens), ranks.sum(dropped)
    if router is not None and router.on and expert_tokens is not None:
        scores_LE, values_L2 = router.sums()
        balance_loss, z_loss = router.finish_step(ranks.sum(scores_LE), ranks.sum(values_L2), expert_tokens)
    mean_loss = (ranks.sum(loss_sum) / target_tokens).item()
    norm = gradients.norm()
    grad_norm = norm.item()
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        raise Diverged(f"loss {mean_loss}, gradient norm {grad_norm}")
    if clip_norm is not None:
        gradients.clip(norm, clip_norm)
    set_learning_rate(optimizer, lr, router_scale=router_scale)
    optimizer.step()
    gradients.publish()
    optimizer_s = clock() - started

    return StepResult(
        loss=mean_loss,
        grad_norm=grad_norm,
        tokens=tokens,
        target_tokens=target_tokens,
        expert_tokens=None if expert_tokens is None else expert_tokens.cpu(),
        dropped=None if dropped is None else dropped.cpu(),
        balance_loss=balance_loss,
        z_loss=z_loss,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        wait_s=METER.take_s(),
    )


@torch.no_grad()
def count_routes(model: PreTrainedModel, batches: list[Batch]) -> Tensor:
    """int64 [MoE layers, E]: this rank's assignments of the step, by forward passes alone."""
    model.eval()
    total: Tensor | int = 0
    for batch in batches:
        with count_routing() as routing:
            hidden_states(model, batch)
        total = total + routing.stacked() * batch.counts
    assert isinstance(total, Tensor)
    return total


def stopwatch(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that waits for the device's queue first, so that a phase's time is its own."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
