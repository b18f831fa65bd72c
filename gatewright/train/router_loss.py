"""The router's own losses in a training step: their weights in force, and the load they are held against.

`global` balance needs each expert's share of the *whole* step's assignments before the step's first backward pass.
It takes the shares of the step before, which loads that hardly move from step to step allow, and counts the first
step's by a forward pass of its own. That makes the gradient independent of how a step is cut into micro-batches and
spread over ranks, which a share that grows with every micro-batch is not.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gatewright.data.batch import Batch
from gatewright.model.routing import RouterWatch, Terms


@dataclass(kw_only=True)
class RouterLoss:
    """Weights in force, and sums over the micro-batches of the current step. Shapes: L MoE layers, E experts."""

    watch: RouterWatch
    over: Literal["micro", "sequence", "global"]
    balance: float
    z: float
    share_LE: Tensor | None = None
    """float32: what `global` is held against. Part of a run's state."""

    @property
    def on(self) -> bool:
        return bool(self.balance or self.z)

    @property
    def wants_share(self) -> bool:
        """Whether the shares must be counted before this step."""
        return bool(self.balance) and self.over == "global" and self.share_LE is None

    def begin_step(self, *, step_tokens: int) -> None:
        """`step_tokens`: tokens of all micro-batches on all ranks."""
        self._tokens = step_tokens
        self._scores_LE: Tensor | float = 0.0
        self._values_L2: Tensor | float = 0.0

    def begin(self, batch: Batch) -> None:
        """Switches the losses on for this micro-batch's forward and backward pass; a filler has none."""
        self._counts = batch.counts
        self.watch.terms = Terms(
            balance=self.balance if batch.counts else 0.0,
            over=self.over,
            z=self.z if batch.counts else 0.0,
            step_tokens=self._tokens,
            cu_seqlens_S1=batch.cu_seqlens_S1,
            share_LE=self.share_LE,
        )

    def end(self) -> None:
        """Switches them off, and adds up what they were."""
        self.watch.terms = None
        layers = [router.layer for router in self.watch.routers]
        scores_LE = torch.stack([self.watch.score_sums[layer] for layer in layers])
        self._scores_LE = self._scores_LE + scores_LE * self._counts
        values = [torch.stack(self.watch.values[layer]) for layer in layers]
        self._values_L2 = self._values_L2 + torch.stack(values)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Σ p [L, E] and Σ (balance, z) [L, 2] of this rank's micro-batches; add them up over ranks."""
        assert isinstance(self._scores_LE, Tensor) and isinstance(self._values_L2, Tensor)
        return self._scores_LE, self._values_L2

    def finish_step(self, scores_LE: Tensor, values_L2: Tensor, counts_LE: Tensor) -> tuple[float | None, float | None]:
        """The step's (balance, z) over all ranks, unweighted, from the sums and the assignments of all of them."""
        share_LE = shares(counts_LE)
        balance_L = values_L2[:, 0]
        if self.over == "global":  # by this step's own shares, not by those it was held against
            balance_L = (share_LE * scores_LE).sum(dim=1) * scores_LE.shape[1] / self._tokens
        self.share_LE = share_LE
        return (
            balance_L.mean().item() if self.balance else None,
            values_L2[:, 1].mean().item() if self.z else None,
        )


def shares(counts_LE: Tensor) -> Tensor:
    """[L, E] float32: each expert's share of its layer's assignments."""
    return (counts_LE / counts_LE.sum(dim=1, keepdim=True).clamp(min=1)).float()
