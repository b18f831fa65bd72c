"""The experts seam: grouped matrix products over all experts, with low-rank updates, registered as `gatewright`.

Every row goes through its expert's frozen weight and, beside it, through that expert's LoRA pair:

    y = x W_eᵀ + s · (x A_eᵀ) B_eᵀ

all three by `grouped_mm` over rows sorted by expert. No W + ΔW is ever formed and no dense dW: the backward pass
touches x, A and B only. What the router chose is counted on the way.

Shapes: T tokens, k choices a token, S = T·k rows, E experts, H hidden, I expert width, r rank.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from gatewright.model.capacity import Capacity, kept
from gatewright.model.routing import counts_now

NAME = "gatewright"
LORA = "gatewright_lora"


class ExpertLora(nn.Module):
    """Low-rank pairs of one experts module, one pair an expert and weight.

    `A[name]`: [E, r, in], `B[name]`: [E, out, r], float32, for name in the experts module's own weight names
    (gate_up_proj or up_proj, down_proj). B starts at zero.
    """

    def __init__(self, shapes: dict[str, tuple[int, int, int]], rank: int, scale: float, device: torch.device) -> None:
        """`shapes`: name -> (E, out, in)."""
        super().__init__()
        self.rank = rank
        self.scale = scale
        self.A = nn.ParameterDict()
        self.B = nn.ParameterDict()
        for name, (experts, out_features, in_features) in shapes.items():
            self.A[name] = nn.Parameter(torch.empty(experts, rank, in_features, device=device))
            self.B[name] = nn.Parameter(torch.zeros(experts, out_features, rank, device=device))


def find_experts(model: nn.Module) -> dict[int, nn.Module]:
    """Layer index -> experts module, for each module that transformers runs through its experts interface."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if "is_transposed" in vars(module) and isinstance(
            module.__dict__["_parameters"].get("down_proj"), nn.Parameter
        ):
            match = re.search(r"\.(\d+)\.", name)
            found[int(match[1]) if match else len(found)] = module
    return found


def lora_shapes(experts: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Weight name -> (E, out, in), in the order the module declares them."""
    shapes = {}
    for name, weight in experts.named_parameters(recurse=False):
        if weight.dim() == 3:
            count, first, second = weight.shape
            shapes[name] = (count, second, first) if experts.is_transposed else (count, first, second)
    return shapes


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Output of a layer's experts, [T, H], for x_TH, chosen experts [T, k] and their weights [T, k].

    `self` is transformers' experts module; the signature is that of its experts interface.
    """
    rows = sort_rows(self, top_k_index, top_k_weights)
    if self.gatewright_dispatch is not None:
        return self.gatewright_dispatch(self, hidden_states, top_k_weights, rows)
    return run_experts(self, hidden_states, top_k_weights, rows)


def run_experts(self: nn.Module, hidden_states: Tensor, top_k_weights: Tensor, rows: Rows) -> Tensor:
    """The same for sorted rows, all of whose experts this rank has."""
    lora = self._modules.get(LORA)
    pairs = (
        [pair for name in (_up_name(self), "down_proj") for pair in (lora.A[name], lora.B[name])]
        if lora
        else [None] * 4
    )
    frozen = not any(p.requires_grad for p in self._parameters.values() if p is not None)
    if frozen and not self.has_bias and not self.has_post_expert_norm:
        return _FrozenExperts.apply(hidden_states, top_k_weights, *pairs, self, rows)
    return plain_experts(self, hidden_states, top_k_weights, pairs, rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a layer, sorted by expert: S = T·k of them, fewer where some were dropped."""

    order_S: Tensor
    """Row i of the sorted rows is choice order[i] % k of token order[i] // k."""
    ends_E: Tensor
    """int32: where each expert's rows end."""
    tokens: int
    choices: int

    def spread(self, x_TH: Tensor) -> Tensor:
        """[S, H]: each token once for each of its choices."""
        return x_TH[self.order_S // self.choices]

    def gather(self, y_SH: Tensor) -> Tensor:
        """[T, H]: the sum over each token's choices; a dropped one adds nothing.

        A sum over a fixed axis, not index_add: the same result every time, on a GPU too.
        """
        slots, rows = self.tokens * self.choices, len(self.order_S)
        back_S = torch.full((slots,), rows, device=self.order_S.device)
        back_S[self.order_S] = torch.arange(rows, device=self.order_S.device)
        if rows < slots:
            y_SH = torch.cat([y_SH, y_SH.new_zeros(1, y_SH.shape[1])])
        return y_SH[back_S].view(self.tokens, self.choices, y_SH.shape[1]).sum(dim=1)


def sort_rows(experts: nn.Module, index_Tk: Tensor, weight_Tk: Tensor) -> Rows:
    """The layer's rows by expert, within its capacity if it has one; what was chosen and dropped is counted."""
    expert_S, count = index_Tk.reshape(-1), experts.num_experts
    counts_E = torch.bincount(expert_S, minlength=count)
    capacity: Capacity | None = experts.gatewright_capacity
    collector = counts_now.get()
    if collector is not None:
        collector.by_layer[experts.gatewright_layer] = counts_E
    if capacity is None:
        order_S = torch.argsort(expert_S, stable=True)
        return Rows(order_S, counts_E.cumsum(0).int(), *index_Tk.shape)
    keep_S = kept(expert_S, weight_Tk.reshape(-1), experts=count, capacity=capacity)
    chosen_S = keep_S.nonzero().squeeze(1)
    order_S = chosen_S[torch.argsort(expert_S[chosen_S], stable=True)]
    if collector is not None:
        collector.dropped[experts.gatewright_layer] = len(expert_S) - keep_S.sum()
    return Rows(order_S, torch.bincount(expert_S[chosen_S], minlength=count).cumsum(0).int(), *index_Tk.shape)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """y = x Wᵀ + s (x Aᵀ) Bᵀ, each row with the weights of its expert; and the gradients of it, W being frozen."""

    weight_ENK: Tensor
    a_ErK: Tensor | None
    b_ENr: Tensor | None
    scale: float
    ends_E: Tensor

    def __call__(self, x_SK: Tensor) -> Tensor:
        y_SN = grouped_mm(x_SK, self.weight_ENK.transpose(-2, -1), self.ends_E)
        if self.a_ErK is None or self.b_ENr is None:
            return y_SN
        low_Sr = grouped_mm(x_SK, self.a_ErK.transpose(-2, -1), self.ends_E)
        return y_SN.add(grouped_mm(low_Sr, self.b_ENr.transpose(-2, -1), self.ends_E), alpha=self.scale)

    def backward(self, x_SK: Tensor, grad_SN: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of (x, A, B) for the gradient of y."""
        grad_x_SK = grouped_mm(grad_SN, self.weight_ENK, self.ends_E)
        if self.a_ErK is None or self.b_ENr is None:
            return grad_x_SK, None, None
        low_Sr = grouped_mm(x_SK, self.a_ErK.transpose(-2, -1), self.ends_E)
        grad_low_Sr = grouped_mm(grad_SN, self.b_ENr, self.ends_E) * self.scale
        grad_x_SK += grouped_mm(grad_low_Sr, self.a_ErK, self.ends_E)
        grad_a_ErK = F.grouped_mm(grad_low_Sr.T, x_SK, offs=self.ends_E)
        # The transpose of the product that gives Bᵀ's gradient: up to four times as fast as the other way on a CPU.
        grad_b_ErN = F.grouped_mm(low_Sr.T, grad_SN, offs=self.ends_E) * self.scale
        return grad_x_SK, grad_a_ErK, grad_b_ErN.transpose(1, 2)


def plain_experts(
    experts: nn.Module, x_TH: Tensor, weight_Tk: Tensor, pairs: list[Tensor | None], rows: Rows
) -> Tensor:
    """The experts' output by autograd alone: for weights that train, for biases and norms; the other's reference."""
    up, down = _linears(experts, x_TH.dtype, pairs, rows)
    sorted_S = torch.bucketize(torch.arange(len(rows.order_S), device=x_TH.device), rows.ends_E, right=True)
    up_S = up(rows.spread(x_TH))
    if experts.has_bias:
        up_S = up_S + experts._parameters[f"{_up_name(experts)}_bias"][sorted_S]
    y_SH = down(_activate(experts, up_S))
    if experts.has_bias:
        y_SH = y_SH + experts._parameters["down_proj_bias"][sorted_S]
    if experts.has_post_expert_norm:
        y_SH = experts.post_expert_norm(y_SH)
    return rows.gather(y_SH * weight_Tk.reshape(-1)[rows.order_S, None]).to(x_TH.dtype)


class _FrozenExperts(torch.autograd.Function):
    """The experts' output with frozen weights, keeping for the backward pass one tensor of S rows: the up-projection.

    The routing weight multiplies the down-projection's input, not its output. What the sorted copies of x, the
    activation and the down-projection hold is made again from it; the gradient of a routing weight, ⟨y, dout⟩, is
    ⟨h, dh⟩ since the down-projection is linear, so y is not needed either.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_Tk: Tensor,
        up_a: Tensor | None,
        up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        experts: nn.Module,
        rows: Rows,
    ) -> Tensor:
        pairs = [up_a, up_b, down_a, down_b]
        up, down = _linears(experts, x_TH.dtype, pairs, rows)
        up_S = up(rows.spread(x_TH))
        weighted_SI = _activate(experts, up_S) * weight_Tk.reshape(-1)[rows.order_S, None]
        y_SH = down(weighted_SI.to(up_S.dtype))
        ctx.save_for_backward(x_TH, weight_Tk, up_S, *pairs)
        ctx.experts, ctx.rows = experts, rows
        return rows.gather(y_SH).to(x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TH, weight_Tk, up_S, *pairs = ctx.saved_tensors
        experts, rows = ctx.experts, ctx.rows
        up, down = _linears(experts, x_TH.dtype, pairs, rows)
        weight_S1 = weight_Tk.reshape(-1)[rows.order_S, None]
        with torch.enable_grad():
            up_S = up_S.detach().requires_grad_()
            inner_SI = _activate(experts, up_S)

        weighted_SI = (inner_SI.detach() * weight_S1).to(up_S.dtype)
        grad_weighted_SI, grad_down_a, grad_down_b = down.backward(weighted_SI, rows.spread(grad_TH.to(up_S.dtype)))
        grad_weight_Tk = torch.zeros_like(weight_Tk)
        grad_weight_Tk.view(-1)[rows.order_S] = (grad_weighted_SI * inner_SI.detach()).sum(dim=1).to(weight_Tk.dtype)
        [grad_up_S] = torch.autograd.grad(inner_SI, up_S, (grad_weighted_SI * weight_S1).to(inner_SI.dtype))
        grad_x_SH, grad_up_a, grad_up_b = up.backward(rows.spread(x_TH), grad_up_S)
        grads = [_like(g, p) for g, p in zip((grad_up_a, grad_up_b, grad_down_a, grad_down_b), pairs, strict=True)]
        return rows.gather(grad_x_SH).to(x_TH.dtype), grad_weight_Tk, *grads, None, None


def _linears(
    experts: nn.Module, dtype: torch.dtype, pairs: list[Tensor | None], rows: Rows
) -> tuple[GroupedLinear, GroupedLinear]:
    lora = experts._modules.get(LORA)
    scale = lora.scale if lora else 0.0
    linears = []
    for name, (a, b) in ((_up_name(experts), pairs[:2]), ("down_proj", pairs[2:])):
        weight = experts._parameters[name]
        a_ErK = None if a is None else _pad_rank(a.to(dtype), dim=1)
        b_ENr = None if b is None else _pad_rank(b.to(dtype), dim=2)
        weight_ENK = weight.transpose(-2, -1) if experts.is_transposed else weight
        linears.append(GroupedLinear(weight_ENK, a_ErK, b_ENr, scale, rows.ends_E))
    return linears[0], linears[1]


def _up_name(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _activate(experts: nn.Module, up_S: Tensor) -> Tensor:
    return experts._apply_gate(up_S) if experts.has_gate else experts.act_fn(up_S)


def _like(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """The gradient of an adapter without the rows or columns that padding its rank added, in its own type."""
    if grad is None or parameter is None:
        return None
    return grad[:, : parameter.shape[1], : parameter.shape[2]].to(parameter.dtype)


def _pad_rank(factor: Tensor, *, dim: int) -> Tensor:
    """Zero-pads the rank axis to a multiple of 16 bytes, which grouped_mm demands of every stride."""
    missing = -factor.shape[dim] % (16 // factor.element_size())
    if not missing:
        return factor
    return F.pad(factor, (0, missing) if dim == 2 else (0, 0, 0, missing))


def grouped_mm(x_SK: Tensor, w_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """[S, N]: rows ends[e-1] … ends[e] of x times w[e]. With no rows at all the result still carries gradients."""
    if x_SK.shape[0] == 0:
        # The kernel's backward refuses an empty input; this keeps the graph with zero gradients.
        return x_SK.new_zeros(0, w_EKN.shape[2]) + x_SK.sum() * 0 + w_EKN.sum() * 0
    return F.grouped_mm(x_SK, w_EKN, offs=ends_E)


def install(model: nn.Module) -> None:
    """Points the model at our experts forward and tells each experts module which layer it is; dropless and whole at first."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for layer, experts in find_experts(model).items():
        experts.gatewright_layer = layer
        experts.gatewright_capacity = None
        experts.gatewright_dispatch = None
        experts.gatewright_first_expert = 0


def set_capacity(model: nn.Module, capacity: Capacity | None) -> None:
    """Bounds the experts of every layer, or none."""
    for experts in find_experts(model).values():
        experts.gatewright_capacity = capacity
