"""Routers as transformers runs them: found, watched, and given a balance loss and a z-loss of our own.

A forward hook on each router sees its logits and its choice. The losses are attached to the routing weights it hands
on: their gradient is injected when the backward pass comes by, so it reaches the router and the hidden states once,
whatever the main loss is divided by, and also when checkpointing runs the layer a second time.

    balance, layer l:  E Σ_t ⟨f(t), p_t⟩ / N       1 when balanced
    z, layer l:        Σ_t logsumexp(logits_t)² / N

p_t are a token's routing probabilities, f the share of assignments each expert got (a constant for the gradient) over
the micro-batch, the token's document, or the whole step, and N the tokens of the whole step on all ranks. A step's
loss is the mean over layers. So neither the number of micro-batches nor of ranks changes it.

Shapes: T tokens, k choices a token, E experts, S documents, L MoE layers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from gatewright.spec.errors import ModelError

CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass
class RoutingCounts:
    """Assignments per expert of one micro-batch, by layer, and how many were dropped for want of capacity.

    A layer *sets* its row, it does not add to it: when gradient checkpointing runs the layer's forward again in the
    backward pass, the same numbers are written a second time and nothing is counted twice.
    """

    by_layer: dict[int, Tensor] = field(default_factory=dict)
    dropped: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self) -> Tensor:
        """int64 [L, E], rows in order of the layer index."""
        return torch.stack([self.by_layer[layer] for layer in sorted(self.by_layer)])

    def stacked_drops(self) -> Tensor:
        """int64 [L]; zeros where nothing can be dropped."""
        layers = sorted(self.by_layer)
        none = torch.zeros((), dtype=torch.int64, device=self.by_layer[layers[0]].device)
        return torch.stack([self.dropped.get(layer, none) for layer in layers])


counts_now: ContextVar[RoutingCounts | None] = ContextVar("routing_counts", default=None)


@contextmanager
def count_routing() -> Iterator[RoutingCounts]:
    """Collects the routing of every forward (and recomputed forward) inside the block."""
    counts = RoutingCounts()
    token = counts_now.set(counts)
    try:
        yield counts
    finally:
        counts_now.reset(token)


@dataclass(frozen=True, slots=True)
class Router:
    """The router of one layer."""

    layer: int
    name: str
    """Its path in the model."""
    module: nn.Module
    bias_E: Tensor | None
    """What DeepSeek-style routers add to the scores for the choice alone."""
    gate: str = ""
    """Path inside the module of what holds the weight; empty: the module itself."""

    @property
    def weight(self) -> Tensor:
        """[E, hidden]."""
        return self.module.get_submodule(self.gate).weight


def find_routers(model: nn.Module, experts: dict[int, nn.Module]) -> list[Router]:
    """The routers beside these experts modules (layer index -> module), in order of the layer.

    Raises ModelError for a layer that has none, as far as its modules tell.
    """
    names = {id(module): name for name, module in model.named_modules()}
    routers = []
    for layer in sorted(experts):
        block_name = names[id(experts[layer])].rpartition(".")[0]
        block = model.get_submodule(block_name)
        gate = _gate(block, experts[layer].num_experts)
        if gate is None:
            raise ModelError(
                f"{block_name}: no module of it has a weight with a row for each expert: no router is known"
            )
        tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        bias = next((t for name, t in tensors.items() if name.rpartition(".")[2] in CORRECTION_BIASES), None)
        bias_E = None if bias is None else bias.detach().view(-1)
        name, _, within = gate.partition(".")
        routers.append(Router(layer, f"{block_name}.{name}", block.get_submodule(name), bias_E, within))
    return routers


def _gate(block: nn.Module, experts: int) -> str | None:
    """Path in the block of the module whose weight is [experts, hidden]: a child, or (AFMoE) the child of one."""
    paths = sorted((name for name, _ in block.named_modules() if name.count(".") < 2), key=lambda name: "." in name)
    for path in paths:
        module = block.get_submodule(path)
        # The weight of a router that an adapter or a float32 copy stands in front of is no plain parameter.
        weight = module.weight if is_parametrized(module, "weight") else module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and weight.shape[0] == experts:
            return path
    return None


@dataclass(kw_only=True)
class Terms:
    """What the losses of one micro-batch need."""

    balance: float
    """Weight of the balance loss; 0: none."""
    over: Literal["micro", "sequence", "global"]
    z: float
    """Weight of the z-loss; 0: none."""
    step_tokens: int
    """N: tokens of the whole step, on all ranks."""
    cu_seqlens_S1: Tensor
    share_LE: Tensor | None
    """Share of assignments each expert gets over the whole step, for `global`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One layer's routing of one micro-batch, detached."""

    logits_TE: Tensor
    index_Tk: Tensor
    scores_TE: Tensor
    """Routing probabilities: each row sums to 1, whatever the router's score function."""


class RouterWatch:
    """Hooks on all routers. `terms` switches the losses on for what runs next, `recording` keeps what routers do."""

    def __init__(self, routers: list[Router], *, scores: Mapping[int, str] | None = None) -> None:
        """`scores`: layer -> score function, where it is known; else it is told from the first forward pass."""
        self.routers = routers
        self.terms: Terms | None = None
        self.recording = False
        self.seen: dict[int, Seen] = {}
        self.score_sums: dict[int, Tensor] = {}
        """Layer -> Σ_t p_t [E] of the current micro-batch."""
        self.values: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer -> (balance, z) of the current micro-batch, unweighted; set again, not added to, by a recomputation."""
        self._score = dict(scores or {})
        for row, router in enumerate(routers):
            router.module.register_forward_hook(self._hook(row, router))

    def _hook(self, row: int, router: Router) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if self.terms is None and not self.recording:
                return None
            logits_TE, weights_Tk, index_Tk = _read(router, output)
            if router.layer not in self._score:
                self._score[router.layer] = score_function(router, logits_TE, weights_Tk, index_Tk)
            scores_TE = probabilities(self._score[router.layer], logits_TE.float())
            if self.recording:
                self.seen[router.layer] = Seen(logits_TE.detach(), index_Tk, scores_TE.detach())
            if self.terms is None:
                return None
            if not torch.is_grad_enabled():
                raise ModelError(
                    f"{router.name}: re-entrant gradient checkpointing runs the router without gradients, so no loss "
                    "can reach it; use train.checkpointing, which is of the other kind"
                )
            self.score_sums[router.layer] = scores_TE.detach().sum(dim=0)
            loss = self._loss(row, router.layer, logits_TE, scores_TE, index_Tk, self.terms)
            if not loss.requires_grad:
                return None
            return logits_TE, _Attach.apply(weights_Tk, loss), index_Tk

        return hook

    def _loss(
        self, row: int, layer: int, logits_TE: Tensor, scores_TE: Tensor, index_Tk: Tensor, terms: Terms
    ) -> Tensor:
        """This layer's part of the step's weighted loss."""
        experts = scores_TE.shape[1]
        balance = z = scores_TE.new_zeros(())
        if terms.balance:
            share = _share(row, index_Tk, experts, terms)
            balance = experts * (scores_TE * share).sum() / terms.step_tokens
        if terms.z:
            z = logits_TE.float().logsumexp(dim=-1).square().sum() / terms.step_tokens
        self.values[layer] = (balance.detach(), z.detach())
        return (terms.balance * balance + terms.z * z) / len(self.routers)


def _read(router: Router, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, E], routing weights [T, k], chosen experts [T, k]) of what a router gives."""
    if isinstance(output, tuple) and len(output) == 3:
        return output
    raise ModelError(
        f"{router.name} is a {type(router.module).__name__}, which does not give (logits, weights, chosen experts): it "
        "cannot be watched, so the architecture cannot be trained"
    )


def _share(row: int, index_Tk: Tensor, experts: int, terms: Terms) -> Tensor:
    """f of every token: [E], or [T, E] where documents differ."""
    if terms.over == "global":
        assert terms.share_LE is not None
        return terms.share_LE[row].to(index_Tk.device)
    if terms.over == "micro":
        return torch.bincount(index_Tk.flatten(), minlength=experts) / max(1, index_Tk.numel())
    tokens = len(index_Tk)
    document_T = torch.bucketize(
        torch.arange(tokens, device=index_Tk.device), terms.cu_seqlens_S1[1:].to(index_Tk.device), right=True
    )
    documents = len(terms.cu_seqlens_S1) - 1
    flat = (document_T[:, None] * experts + index_Tk).flatten()
    counts_SE = torch.bincount(flat, minlength=documents * experts).view(documents, experts)
    share_SE = counts_SE / counts_SE.sum(dim=1, keepdim=True).clamp(min=1)
    return share_SE[document_T]


class _Attach(torch.autograd.Function):
    """Hands `weights` on unchanged; in the backward pass `loss` gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.shape, loss.dtype, loss.device)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.loss
        return grad_weights, torch.ones(shape, dtype=dtype, device=device)


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def probabilities(score: str, logits_TE: Tensor) -> Tensor:
    """[T, E]: the scores over their sum, as DeepSeek-V3's sequence loss has them; for softmax the scores themselves."""
    scores_TE = _SCORES[score](logits_TE)
    return scores_TE if score == "softmax" else scores_TE / scores_TE.sum(dim=-1, keepdim=True)


def score_function(router: Router, logits_TE: Tensor, weights_Tk: Tensor, index_Tk: Tensor) -> str:
    """Which function of the logits the routing weights are made of, told from what the router did.

    Weights are the chosen experts' scores, perhaps normalised and scaled: within a token (with one choice: over all
    tokens) they must be in proportion to the scores. Raises ModelError where no function fits.
    """
    errors = {}
    for name, function in _SCORES.items():
        chosen_Tk = function(logits_TE.detach().float()).gather(1, index_Tk)
        ratio_Tk = weights_Tk.detach().float() / chosen_Tk.clamp(min=1e-30)
        dim = 1 if index_Tk.shape[1] > 1 else 0
        errors[name] = ((ratio_Tk.amax(dim) - ratio_Tk.amin(dim)) / ratio_Tk.mean(dim).clamp(min=1e-30)).median().item()
    best = min(errors, key=errors.__getitem__)
    if not errors[best] <= 0.05:
        raise ModelError(
            f"{router.name}: the routing weights of {type(router.module).__name__} are no known function of its logits "
            f"(softmax, sigmoid and sqrt-softplus are off by {min(errors.values()):.0%}); set router.balance to 0"
        )
    return best
