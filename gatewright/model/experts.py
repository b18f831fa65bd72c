"""The experts seam: grouped matrix products over all experts, with low-rank updates, registered as `gatewright`.

Every row goes through its expert's frozen weight and, beside it, through that expert's LoRA pair:

    y = x W_eᵀ + s · (x A_eᵀ) B_eᵀ

all three by `grouped_mm` over rows sorted by expert. No W + ΔW is ever formed and no dense dW: the backward pass
touches x, A and B only. What the router chose is counted on the way.

Shapes: T tokens, k choices a token, S = T·k rows, E experts, H hidden, I expert width, r rank.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from gatewright.model.capacity import Capacity, kept
from gatewright.model.expert_lora import LORA, LowRank, Update, grouped_mm, low_rank, without_padding
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.routing import counts_now

NAME = "gatewright"


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
    """Weight name -> (experts of this rank, out, in), in the order the module declares them."""
    shapes = {}
    for name, weight in experts.named_parameters(recurse=False):
        if weight.dim() == 3:
            _, first, second = weight.shape  # whose first axis may be divided over ranks
            count = len(experts.gatewright_held)
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


def run_experts(self: nn.Module, hidden_states: Tensor, top_k_weights: Tensor, rows: "Rows") -> Tensor:
    """The same for sorted rows, all of whose experts this rank has."""
    lora, pairs, update = self._modules.get(LORA), [None] * 4, None
    if lora is not None:
        pairs = [part.get(name) for name in _weight_names(self) for part in (lora.A, lora.B)]
        update = lora.update(rows.expert_S, rows.ends_E)
    frozen = not any(p.requires_grad for p in self._parameters.values() if p is not None)
    if frozen and not self.has_post_expert_norm:
        return _FrozenExperts.apply(hidden_states, top_k_weights, *pairs, self, rows, update)
    return plain_experts(self, hidden_states, top_k_weights, pairs, rows, update)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a layer, sorted by expert: S = T·k of them, fewer where some were dropped."""

    order_S: Tensor
    """Row i of the sorted rows is choice order[i] % k of token order[i] // k."""
    ends_E: Tensor
    """int32: where each expert's rows end."""
    tokens: int
    choices: int

    @property
    def expert_S(self) -> Tensor:
        """int64 [S]: the expert of each sorted row."""
        return torch.bucketize(torch.arange(len(self.order_S), device=self.ends_E.device), self.ends_E, right=True)

    @property
    def token_S(self) -> Tensor:
        """int64 [S]: the token of each sorted row."""
        return self.order_S // self.choices

    def spread(self, x_TH: Tensor) -> Tensor:
        """[S, H]: each token once for each of its choices."""
        return _Spread.apply(x_TH, self)

    def gather(self, y_SH: Tensor) -> Tensor:
        """[T, H]: the sum over each token's choices; a dropped one adds nothing."""
        return _Gather.apply(y_SH, self)

    def sum_choices(self, y_SH: Tensor) -> Tensor:
        """[T, H], in one pass over the rows and in a fixed order: the same result every time, on a GPU too."""
        slots, rows = self.tokens * self.choices, len(self.order_S)
        if not rows:
            return y_SH.new_zeros(self.tokens, y_SH.shape[1])
        back_S = self.order_S.new_zeros(slots)
        back_S[self.order_S] = torch.arange(rows, device=self.order_S.device)
        kept_Tk = None
        if rows < slots:
            kept_Tk = y_SH.new_zeros(slots)
            kept_Tk[self.order_S] = 1.0
            kept_Tk = kept_Tk.view(self.tokens, self.choices)
        back_Tk = back_S.view(self.tokens, self.choices)
        return F.embedding_bag(back_Tk, y_SH, mode="sum", per_sample_weights=kept_Tk)


class _Spread(torch.autograd.Function):
    """Each is the other's gradient; torch's own gradient of an index adds rows one by one."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x_TH.index_select(0, rows.token_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.rows.sum_choices(grad_SH), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SH: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.sum_choices(y_SH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad_TH.index_select(0, ctx.rows.token_S), None


def sort_rows(experts: nn.Module, index_Tk: Tensor, weight_Tk: Tensor) -> Rows:
    """The layer's rows by expert, within its capacity if it has one; what was chosen and dropped is counted.

    Counts go by the experts' numbers, rows by the order in which the ranks hold the experts.
    """
    expert_S, count = index_Tk.reshape(-1), experts.num_experts
    counts_E = torch.bincount(expert_S, minlength=count)
    capacity: Capacity | None = experts.gatewright_capacity if experts.training else None
    collector = counts_now.get()
    if collector is not None:
        collector.by_layer[experts.gatewright_layer] = counts_E
    position_E = experts.gatewright_position_E
    if position_E is not None:
        expert_S, counts_E = position_E[expert_S], counts_E.scatter(0, position_E, counts_E)
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

    weight: Tensor
    """[E, N, K], or [E, K, N] if `transposed`; perhaps stored in few bits."""
    transposed: bool
    low_rank: LowRank | None
    ends_E: Tensor

    def weight_ENK(self, dtype: torch.dtype) -> Tensor:
        """The weight for a product in `dtype`, made dense for it alone if it is stored in few bits."""
        weight = self.weight.dense(dtype) if isinstance(self.weight, QuantizedWeight) else self.weight
        return weight.transpose(-2, -1) if self.transposed else weight

    def __call__(self, x_SK: Tensor) -> Tensor:
        if isinstance(self.weight, QuantizedWeight):
            y_SN = _DenseTwice.apply(x_SK, self)
        else:
            y_SN = grouped_mm(x_SK, self.weight_ENK(x_SK.dtype).transpose(-2, -1), self.ends_E)
        return y_SN if self.low_rank is None else self.low_rank.add_to(y_SN, x_SK)

    def factor_grads(self, x_SK: Tensor, grad_SN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of (A, B) and of x Aᵀ for the gradient of y; after it, x is no longer needed."""
        return (None, None, None) if self.low_rank is None else self.low_rank.factor_grads(x_SK, grad_SN)

    def input_grad(self, grad_SN: Tensor, grad_low: Tensor | None) -> Tensor:
        """Gradient of x for those of y and of x Aᵀ."""
        grad_x_SK = grouped_mm(grad_SN, self.weight_ENK(grad_SN.dtype), self.ends_E)
        if self.low_rank is None or grad_low is None:
            return grad_x_SK
        return self.low_rank.add_input_grad(grad_x_SK, grad_low)


class _DenseTwice(torch.autograd.Function):
    """x Wᵀ for a weight in few bits: dense in the forward pass, and anew in the backward pass, never between them."""

    @staticmethod
    def forward(ctx: Any, x_SK: Tensor, linear: GroupedLinear) -> Tensor:
        ctx.linear = linear
        return grouped_mm(x_SK, linear.weight_ENK(x_SK.dtype).transpose(-2, -1), linear.ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        linear: GroupedLinear = ctx.linear
        return grouped_mm(grad_SN, linear.weight_ENK(grad_SN.dtype), linear.ends_E), None


def plain_experts(
    experts: nn.Module,
    x_TH: Tensor,
    weight_Tk: Tensor,
    pairs: list[Tensor | None],
    rows: Rows,
    update: Update | None,
) -> Tensor:
    """The experts' output by autograd alone: for weights that train and for norms; the other's reference."""
    up, down = _linears(experts, x_TH.dtype, pairs, rows, update)
    up_S = _add_bias(experts, _up_name(experts), up(rows.spread(x_TH)), rows)
    y_SH = _add_bias(experts, "down_proj", down(_activate(experts, up_S)), rows)
    if experts.has_post_expert_norm:
        y_SH = experts.post_expert_norm(y_SH)
    return rows.gather(y_SH * weight_Tk.reshape(-1)[rows.order_S, None]).to(x_TH.dtype)


class _FrozenExperts(torch.autograd.Function):
    """The experts' output with frozen weights, keeping for the backward pass one tensor of S rows: the up-projection.

    The routing weight w multiplies the down-projection's input, not its output. What the sorted copies of x, the
    activation and the down-projection hold is made again from it; the gradient of a routing weight, ⟨y, dout⟩ for
    y = h Wᵀ + b, is ⟨h, dh⟩ / w + ⟨b, dout⟩ since the down-projection is linear, so y is not needed either.
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
        update: Update | None,
    ) -> Tensor:
        pairs = [up_a, up_b, down_a, down_b]
        up, down = _linears(experts, x_TH.dtype, pairs, rows, update)
        up_S = _add_bias(experts, _up_name(experts), up(rows.spread(x_TH)), rows)
        weight_S1 = weight_Tk.reshape(-1)[rows.order_S, None]
        inner_SI = _activate(experts, up_S)
        # In place, unless the activation is the identity: up_S is kept.
        weighted_SI = inner_SI * weight_S1 if inner_SI is up_S else inner_SI.mul_(weight_S1)
        y_SH = down(weighted_SI.to(up_S.dtype))
        del inner_SI, weighted_SI
        if experts.has_bias:
            y_SH += (_bias_rows(experts, "down_proj", rows) * weight_S1).to(y_SH.dtype)
        ctx.save_for_backward(x_TH, weight_Tk, up_S, *pairs)
        ctx.experts, ctx.rows, ctx.update = experts, rows, update
        return rows.gather(y_SH).to(x_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TH, weight_Tk, up_S, *pairs = ctx.saved_tensors
        experts, rows = ctx.experts, ctx.rows
        up, down = _linears(experts, x_TH.dtype, pairs, rows, ctx.update)
        weight_S1 = weight_Tk.reshape(-1)[rows.order_S, None]
        with torch.enable_grad():
            up_S = up_S.detach().requires_grad_()
            inner_SI = _activate(experts, up_S)

        # What has S rows is let go as soon as it is used: of [S, H] no two live longer than one product.
        grad_y_SH = rows.spread(grad_TH.to(up_S.dtype))
        weighted_SI = (inner_SI.detach() * weight_S1).to(up_S.dtype)
        grad_down_a, grad_down_b, grad_low = down.factor_grads(weighted_SI, grad_y_SH)
        grad_weighted_SI = down.input_grad(grad_y_SH, grad_low)
        grad_weight_S = torch.mul(grad_weighted_SI, inner_SI.detach(), out=weighted_SI).sum(dim=1)
        if experts.has_bias:
            grad_weight_S += (grad_y_SH * _bias_rows(experts, "down_proj", rows)).sum(dim=1)
        del grad_y_SH, weighted_SI
        grad_weight_Tk = torch.zeros_like(weight_Tk)
        grad_weight_Tk.view(-1)[rows.order_S] = grad_weight_S.to(weight_Tk.dtype)
        [grad_up_S] = torch.autograd.grad(inner_SI, up_S, grad_weighted_SI.mul_(weight_S1).to(inner_SI.dtype))
        del inner_SI, grad_weighted_SI
        grad_up_a, grad_up_b, grad_low = up.factor_grads(rows.spread(x_TH), grad_up_S)
        grad_x_SH = up.input_grad(grad_up_S, grad_low)
        del grad_up_S
        factors = (grad_up_a, grad_up_b, grad_down_a, grad_down_b)
        grads = [without_padding(grad, factor) for grad, factor in zip(factors, pairs, strict=True)]
        return rows.gather(grad_x_SH).to(x_TH.dtype), grad_weight_Tk, *grads, None, None, None


def _linears(
    experts: nn.Module, dtype: torch.dtype, pairs: list[Tensor | None], rows: Rows, update: Update | None
) -> tuple[GroupedLinear, GroupedLinear]:
    linears, masks = [], (None, None) if update is None else update.masks
    for name, (a, b), mask in zip(_weight_names(experts), (pairs[:2], pairs[2:]), masks, strict=True):
        pair = low_rank(a, b, update, mask, dtype=dtype)
        linears.append(GroupedLinear(local(experts._parameters[name]), experts.is_transposed, pair, rows.ends_E))
    return linears[0], linears[1]


def local(weight: Tensor) -> Tensor:
    """The stack of this rank's experts, where FSDP has gathered it as one that is divided over ranks."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _up_name(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _weight_names(experts: nn.Module) -> tuple[str, str]:
    return _up_name(experts), "down_proj"


def _activate(experts: nn.Module, up_S: Tensor) -> Tensor:
    return experts._apply_gate(up_S) if experts.has_gate else experts.act_fn(up_S)


def _bias_rows(experts: nn.Module, name: str, rows: Rows) -> Tensor:
    return local(experts._parameters[f"{name}_bias"])[rows.expert_S]


def _add_bias(experts: nn.Module, name: str, y_SN: Tensor, rows: Rows) -> Tensor:
    return y_SN + _bias_rows(experts, name, rows) if experts.has_bias else y_SN


def install(model: nn.Module) -> None:
    """Points the model at our experts forward, and tells each experts module which layer it is.

    At first none drops tokens, and each is whole on this rank.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for layer, experts in find_experts(model).items():
        experts.gatewright_layer = layer
        experts.gatewright_capacity = None
        experts.gatewright_dispatch = None
        hold(experts, range(experts.num_experts), first=0, count=experts.num_experts)


def hold(experts: nn.Module, order: Sequence[int], *, first: int, count: int) -> None:
    """Says whose weights the module has: of all its experts in this order, the `count` from position `first` on."""
    experts.gatewright_order = tuple(order)
    experts.gatewright_held = experts.gatewright_order[first : first + count]
    position_E = None
    if experts.gatewright_order != tuple(range(experts.num_experts)):
        order_E = torch.tensor(experts.gatewright_order, device=experts._parameters["down_proj"].device)
        position_E = order_E.argsort()
    experts.gatewright_position_E = position_E


def set_capacity(model: nn.Module, capacity: Capacity | None) -> None:
    """Bounds the experts of every layer in training, or none; evaluation never drops."""
    for experts in find_experts(model).values():
        experts.gatewright_capacity = capacity
