"""The experts seam: grouped matrix products over all experts, with low-rank updates, registered as `gatewright`.

Every row goes through its expert's frozen weight and, beside it, through that expert's LoRA pair:

    y = x W_eᵀ + s · (x A_eᵀ) B_eᵀ

all three by `grouped_mm` over rows sorted by expert. No W + ΔW is ever formed and no dense dW: the backward pass
touches x, A and B only. What the router chose is counted on the way.

Shapes: T tokens, k choices a token, S = T·k rows, E experts, H hidden, I expert width, r rank.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "gatewright"
LORA = "gatewright_lora"


@dataclass
class RoutingCounts:
    """Assignments per expert of one micro-batch, by layer.

    A layer *sets* its row, it does not add to it: when gradient checkpointing runs the layer's forward again in the
    backward pass, the same numbers are written a second time and nothing is counted twice.
    """

    by_layer: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self) -> Tensor:
        """int64 [MoE layers, E], rows in order of the layer index."""
        return torch.stack([self.by_layer[layer] for layer in sorted(self.by_layer)])


_counts: ContextVar[RoutingCounts | None] = ContextVar("routing_counts", default=None)


@contextmanager
def count_routing() -> Iterator[RoutingCounts]:
    """Collects the routing of every forward (and recomputed forward) inside the block."""
    counts = RoutingCounts()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


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
    tokens, choices = top_k_index.shape
    expert_S = top_k_index.reshape(-1)
    order_S = torch.argsort(expert_S, stable=True)
    counts_E = torch.bincount(expert_S, minlength=self.num_experts)
    collector = _counts.get()
    if collector is not None:
        collector.by_layer[self.gatewright_layer] = counts_E
    ends_E = counts_E.cumsum(0).int()

    x_SH = hidden_states[order_S // choices]
    sorted_S = expert_S[order_S] if self.has_bias else None
    up = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _grouped_linear(self, up, x_SH, ends_E, sorted_S)
    inner_SI = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    y_SH = _grouped_linear(self, "down_proj", inner_SI, ends_E, sorted_S)
    if self.has_post_expert_norm:
        y_SH = self.post_expert_norm(y_SH)

    y_SH = y_SH * top_k_weights.reshape(-1)[order_S].unsqueeze(-1)
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    # A sum over a fixed axis, not index_add: the same result every time, on a GPU too.
    return y_SH[back_S].view(tokens, choices, hidden_states.shape[1]).sum(dim=1).to(hidden_states.dtype)


def _grouped_linear(experts: nn.Module, name: str, x_S: Tensor, ends_E: Tensor, sorted_S: Tensor | None) -> Tensor:
    weight = experts._parameters[name]
    x_S = x_S.to(weight.dtype)
    y_S = grouped_mm(x_S, weight if experts.is_transposed else weight.transpose(-2, -1), ends_E)
    if sorted_S is not None:
        y_S = y_S + experts._parameters[f"{name}_bias"][sorted_S]
    lora = experts._modules.get(LORA)
    if lora is not None and name in lora.A:
        a_ErI, b_EOr = lora.A[name].to(x_S.dtype), lora.B[name].to(x_S.dtype)
        a_ErI, b_EOr = _pad_rank(a_ErI, dim=1), _pad_rank(b_EOr, dim=2)
        low_Sr = grouped_mm(x_S, a_ErI.transpose(-2, -1), ends_E)
        y_S = y_S.add(grouped_mm(low_Sr, b_EOr.transpose(-2, -1), ends_E), alpha=lora.scale)
    return y_S


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
    """Points the model at our experts forward and tells each experts module which layer it is."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for layer, experts in find_experts(model).items():
        experts.gatewright_layer = layer
