"""Expert parallelism: each rank holds some experts whole, and tokens travel to the rank of the expert they chose.

    x_TH ─ spread ─▶ rows by expert ─ all-to-all ─▶ rows of my experts ─ experts ─▶ all-to-all ─ gather ─▶ y_TH

The backward pass is the same road: the gradient of sending is receiving, that of gathering is spreading. The routing
weights travel with the rows and are applied beside the expert, so the lean backward pass of model/experts.py holds
here as well, and the rows that come back need not be kept.

Shapes: T tokens, k choices a token, S rows sent, R rows received, E experts of the layer, L experts of this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gatewright.model.experts import Rows, run_experts
from gatewright.parallel.collectives import all_to_all


@dataclass(frozen=True, slots=True)
class Route:
    """How many rows go to, and come from, each rank of the group."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def out(self, rows_S: Tensor) -> Tensor:
        """[R, …]: the rows of all ranks that chose an expert of this one, by rank, then by expert."""
        return _exchange(rows_S, self.sent, self.received, self.group)

    def back(self, rows_R: Tensor) -> Tensor:
        """[S, …]: the other way."""
        return _exchange(rows_R, self.received, self.sent, self.group)


class Dispatch:
    """Runs an experts module whose weights are those of this rank on the tokens of the whole group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    def __call__(self, experts: nn.Module, x_TH: Tensor, weight_Tk: Tensor, rows: Rows) -> Tensor:
        """Output of the layer's experts, [T, H], for rows sorted by the layer's expert numbers."""
        route, received_GL = self.route(rows)
        x_RH = _Send.apply(x_TH, rows, route)
        weight_R = _SendWeights.apply(weight_Tk, rows, route)
        mine = received_GL.shape[1]
        expert_R = torch.arange(mine, device=x_TH.device).repeat(self.ranks)
        expert_R = expert_R.repeat_interleave(received_GL.flatten(), output_size=sum(route.received))
        ends_L = received_GL.sum(dim=0).cumsum(0).int()
        local = Rows(torch.argsort(expert_R, stable=True), ends_L, sum(route.received), 1)
        y_RH = run_experts(experts, x_RH, weight_R[:, None], local)
        return _Return.apply(y_RH, rows, route)

    def route(self, rows: Rows) -> tuple[Route, Tensor]:
        """The exchange of these rows, and how many come from each rank for each expert of this one, [ranks, L]."""
        sent_E = rows.ends_E.diff(prepend=rows.ends_E.new_zeros(1)).long()
        sent_GL = sent_E.view(self.ranks, -1)
        received_GL = torch.empty_like(sent_GL)
        all_to_all(received_GL, sent_GL, group=self.group)
        # The one point where the layer waits for the device: the sizes of the exchange are host numbers.
        sent, received = torch.stack([sent_GL.sum(dim=1), received_GL.sum(dim=1)]).tolist()
        return Route(sent, received, self.group), received_GL


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows: Rows, route: Route) -> Tensor:
        ctx.rows, ctx.route = rows, route
        return route.out(rows.spread(x_TH))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.rows.gather(ctx.route.back(grad_RH)), None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, rows: Rows, route: Route) -> Tensor:
        ctx.rows, ctx.route = rows, route
        return rows.gather(route.back(y_RH))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.route.out(ctx.rows.spread(grad_TH)), None, None


class _SendWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_Tk: Tensor, rows: Rows, route: Route) -> Tensor:
        ctx.rows, ctx.route, ctx.shape = rows, route, weight_Tk.shape
        return route.out(weight_Tk.reshape(-1)[rows.order_S])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        grad = grad_R.new_zeros(ctx.shape)
        grad.view(-1)[ctx.rows.order_S] = ctx.route.back(grad_R)
        return grad, None, None


def _exchange(rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(in_sizes), *rows.shape[1:])
    all_to_all(received, rows.contiguous(), in_sizes, out_sizes, group=group)
    return received
