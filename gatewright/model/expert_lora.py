"""Low-rank pairs of fused experts: the parameters, and what they add to a weight's rows, by `grouped_mm`.

Shapes: S rows sorted by expert, E experts, C experts that have a pair, R rows of those, K in, N out, r rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LORA = "gatewright_lora"


class ExpertLora(nn.Module):
    """Low-rank pairs of one experts module, one pair an adapted expert and weight.

    `A[name]`: [C, r, in], `B[name]`: [C, out, r], float32, for some or all of the experts module's own weight names
    (gate_up_proj or up_proj, down_proj). B starts at zero. With `chosen`, only those experts have pairs: the others
    cost no weight, no gradient and no optimizer state. Where ranks divide the experts, each has the pairs of its own;
    that may be none.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int, int]],
        rank: int,
        scale: float,
        device: torch.device,
        *,
        chosen: Sequence[int] | None = None,
        held: Sequence[int] | None = None,
        dropout: float = 0.0,
    ) -> None:
        """`shapes`: name -> (E, out, in). `chosen`: the layer's adapted experts in rising order; None: all.

        `held`: the numbers of the E experts of this rank; None: it has all.
        """
        super().__init__()
        self.rank = rank
        self.scale = scale
        self.dropout = dropout
        self.experts = next(iter(shapes.values()))[0]
        self.adapted = None if chosen is None else tuple(chosen)
        """Of all the layer's experts, on whichever rank, those that have a pair; None: all."""
        self.chosen = self.adapted
        """Of the E experts here, counted from 0, those that have a pair; None: all."""
        if chosen is not None and held is not None:
            self.chosen = tuple(place for place, expert in enumerate(held) if expert in chosen)
        chosen_C = torch.tensor(self.numbers, dtype=torch.int64, device=device)
        self.register_buffer("chosen_C", chosen_C, persistent=False)
        self.A = nn.ParameterDict()
        self.B = nn.ParameterDict()
        count = len(self.numbers)
        for name, (_, out_features, in_features) in shapes.items():
            self.A[name] = nn.Parameter(torch.empty(count, rank, in_features, device=device))
            self.B[name] = nn.Parameter(torch.zeros(count, out_features, rank, device=device))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The experts here that have a pair, counted from 0, in the order of A and B."""
        return tuple(range(self.experts)) if self.chosen is None else self.chosen

    def update(self, expert_S: Tensor, ends_E: Tensor) -> "Update":
        """Which of the rows (their expert, where each expert's end) the pairs act on, and what dropout they see."""
        masks: tuple[DropMask | None, DropMask | None] = (None, None)
        if self.training and self.dropout:
            # Seeds from torch's own generator, so that a layer recomputed in the backward pass draws the same.
            up, down = torch.randint(2**62, (2,)).tolist()
            masks = (DropMask(up, self.dropout), DropMask(down, self.dropout))
        if self.chosen is None:
            return Update(self.scale, ends_E, None, masks)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        has_pair_E = torch.zeros(self.experts, dtype=torch.bool, device=ends_E.device)
        has_pair_E[self.chosen_C] = True
        chosen_R = has_pair_E[expert_S].nonzero().squeeze(1)
        return Update(self.scale, counts_E[self.chosen_C].cumsum(0).int(), chosen_R, masks)


@dataclass(frozen=True, slots=True)
class DropMask:
    """Dropout that can be drawn again: a seed in place of a mask as large as the rows."""

    seed: int
    probability: float

    def __call__(self, x: Tensor) -> Tensor:
        """x with elements zeroed at the given probability, the rest scaled up: the same ones at every call."""
        generator = torch.Generator(x.device).manual_seed(self.seed)
        keep = torch.empty_like(x).bernoulli_(1.0 - self.probability, generator=generator)
        return x * keep.div_(1.0 - self.probability)


@dataclass(frozen=True, slots=True)
class Update:
    """How the pairs of a layer enter one forward pass."""

    scale: float
    ends_C: Tensor
    """int32: where the rows of each expert with a pair end, among the chosen rows."""
    chosen_R: Tensor | None
    """The sorted rows that belong to experts with a pair; None: all of them."""
    masks: tuple[DropMask | None, DropMask | None]
    """Dropout of the rows before the up- and before the down-projection's pair."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """s·(x Aᵀ) Bᵀ, each row with the pair of its expert; and the gradients of it."""

    a_CrK: Tensor
    b_CNr: Tensor
    update: Update
    mask: DropMask | None

    def add_to(self, y_SN: Tensor, x_SK: Tensor) -> Tensor:
        """y plus the update, in place."""
        low_Rr = grouped_mm(self._input(x_SK), self.a_CrK.transpose(-2, -1), self.update.ends_C)
        return self._add(y_SN, low_Rr, self.b_CNr.transpose(-2, -1), self.update.scale)

    def factor_grads(self, x_SK: Tensor, grad_SN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of (A, B) and of x Aᵀ [R, r] for the gradient of y."""
        ends_C, scale = self.update.ends_C, self.update.scale
        x_RK, grad_RN = self._input(x_SK), self._chosen(grad_SN)
        low_Rr = grouped_mm(x_RK, self.a_CrK.transpose(-2, -1), ends_C)
        grad_low_Rr = grouped_mm(grad_RN, self.b_CNr, ends_C) * scale
        # The transpose of the product that gives Bᵀ's gradient: up to four times as fast as the other way on a CPU.
        grad_b_CrN = grouped_outer(low_Rr, grad_RN, ends_C) * scale
        return grouped_outer(grad_low_Rr, x_RK, ends_C), grad_b_CrN.transpose(1, 2), grad_low_Rr

    def add_input_grad(self, grad_x_SK: Tensor, grad_low_Rr: Tensor) -> Tensor:
        """The gradient of x with the update's part added, in place."""
        if self.mask is None:
            return self._add(grad_x_SK, grad_low_Rr, self.a_CrK, 1.0)
        grad_x_RK = self.mask(grouped_mm(grad_low_Rr, self.a_CrK, self.update.ends_C))
        return self._add_rows(grad_x_SK, grad_x_RK, 1.0)

    def _chosen(self, rows_SX: Tensor) -> Tensor:
        return rows_SX if self.update.chosen_R is None else rows_SX[self.update.chosen_R]

    def _input(self, x_SK: Tensor) -> Tensor:
        x_RK = self._chosen(x_SK)
        return x_RK if self.mask is None else self.mask(x_RK)

    def _add(self, into_SN: Tensor, low_Rr: Tensor, w_CrN: Tensor, scale: float) -> Tensor:
        """`into` plus scale · low w, in place."""
        if self.update.chosen_R is None and type(into_SN) is Tensor and into_SN.is_cpu and not torch.is_grad_enabled():
            return _add_products(into_SN, low_Rr, w_CrN, self.update.ends_C, scale)
        return self._add_rows(into_SN, grouped_mm(low_Rr, w_CrN, self.update.ends_C), scale)

    def _add_rows(self, into_SN: Tensor, rows_RN: Tensor, scale: float) -> Tensor:
        if self.update.chosen_R is None:
            return into_SN.add_(rows_RN, alpha=scale)
        return into_SN.index_add_(0, self.update.chosen_R, rows_RN, alpha=scale)


def _add_products(into_SN: Tensor, low_Sr: Tensor, w_ErN: Tensor, ends_E: Tensor, scale: float) -> Tensor:
    """The same on a CPU without a second tensor as large as `into`; a GPU's grouped kernel has no such form."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            into_SN[start:end].addmm_(low_Sr[start:end], w_ErN[expert], alpha=scale)
        start = end
    return into_SN


def low_rank(
    a_CrK: Tensor | None, b_CNr: Tensor | None, update: Update | None, mask: DropMask | None, *, dtype: torch.dtype
) -> LowRank | None:
    """The pair in the rows' type, its rank padded to the multiple of 16 bytes that grouped_mm demands of a stride."""
    if a_CrK is None or b_CNr is None or update is None:
        return None
    return LowRank(_pad_rank(a_CrK.to(dtype), dim=1), _pad_rank(b_CNr.to(dtype), dim=2), update, mask)


def without_padding(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """The gradient of an adapter without the rows or columns that padding its rank added, in its own type."""
    if grad is None or parameter is None:
        return None
    return grad[:, : parameter.shape[1], : parameter.shape[2]].to(parameter.dtype)


def grouped_mm(x_SK: Tensor, w_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """[S, N]: rows ends[e-1] … ends[e] of x times w[e]. With no rows at all the result still carries gradients."""
    if x_SK.shape[0] == 0:
        # The kernel's backward refuses an empty input; this keeps the graph with zero gradients.
        return x_SK.new_zeros(0, w_EKN.shape[2]) + x_SK.sum() * 0 + w_EKN.sum() * 0
    return F.grouped_mm(x_SK, w_EKN, offs=ends_E)


def grouped_outer(x_SM: Tensor, y_SN: Tensor, ends_E: Tensor) -> Tensor:
    """[E, M, N]: xᵀ y over the rows of each expert; zero for an expert without rows."""
    if x_SM.shape[0] == 0:
        return x_SM.new_zeros(len(ends_E), x_SM.shape[1], y_SN.shape[1])
    return F.grouped_mm(x_SM.T, y_SN, offs=ends_E)


def _pad_rank(factor: Tensor, *, dim: int) -> Tensor:
    missing = -factor.shape[dim] % (16 // factor.element_size())
    if not missing:
        return factor
    return F.pad(factor, (0, missing) if dim == 2 else (0, 0, 0, missing))
