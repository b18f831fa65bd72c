"""The router in a run: its losses, its bias, the looks at its health, and what the guard does about it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gatewright.data.loader import Loader
from gatewright.model.experts import find_experts
from gatewright.model.routing import RouterWatch, find_routers
from gatewright.model.subset import never_routed
from gatewright.parallel.ranks import Ranks
from gatewright.router.guard import GuardState, decide, due, in_force, remember, state_from_json, state_to_json
from gatewright.router.verdict import judge
from gatewright.spec.event import GuardActed, RouterHealth
from gatewright.spec.run import Run
from gatewright.train.optim import Named
from gatewright.train.router_look import COST, first_look, look, probe_batches
from gatewright.train.router_loss import RouterLoss

SHARE = "router/share"
ROUTED = "router/routed"
BIAS = "router/bias/"


class RouterControl:
    """All that a run does with its routers besides running them. Made before training, at the state of step 0."""

    def __init__(self, run: Run, model: PreTrainedModel, loader: Loader, *, ranks: Ranks) -> None:
        """Looks at the router for the first time. Raises ModelError for a router that cannot be watched."""
        experts = find_experts(model)
        self.run, self.model, self.settings = run, model, run.router
        self.watch = RouterWatch(find_routers(model, experts))
        self.routers = self.watch.routers
        self.experts = max(module.num_experts for module in experts.values())
        tokens = min(self.settings.guard.probe_tokens, int(COST * self._tokens_between_looks()))
        probe = probe_batches(loader, tokens=tokens, seed=run.train.seed)
        self.ranks = ranks
        self.probe = [batch.to(ranks.device) for batch in probe]
        first, self.reference = first_look(model, self.watch, self.probe)
        self.first = ranks.tell(first)
        self.top_k = self.reference.index_Tk[0][self.routers[0].layer].shape[1]
        self.guard = remember(GuardState(trains=run.router_trains), self.first)
        self.loss = RouterLoss(watch=self.watch, over=self.settings.balance_over, balance=0.0, z=self.settings.z)
        # The guard may freeze and thaw what trained at step 0, and nothing else.
        self._trained = [p for p in self.parameters.values() if p.requires_grad]
        self._untrained = [p.detach().clone() for p in self._trained]
        self.routed_LE = torch.zeros_like(self.reference.counts_LE)
        """Assignments over the whole run."""
        self._take_effect()

    def _tokens_between_looks(self) -> int:
        return self.run.train.tokens_per_step * self.settings.guard.every_steps

    @property
    def parameters(self) -> Named:
        """The routers' own parameters, and what adapts them, by name in the model."""
        prefixes = tuple(f"{router.name}." for router in self.routers)
        return {name: p for name, p in self.model.named_parameters() if name.startswith(prefixes)}

    @property
    def lr_scale(self) -> float:
        """Learning rate of the router over train.lr; 0 where it is frozen."""
        now = in_force(self.settings, self.guard)
        return now.lr_scale if now.trains else 0.0

    @property
    def has_bias(self) -> bool:
        return any(router.bias_E is not None for router in self.routers)

    def after_step(self, step: int, counts_LE: Tensor) -> tuple[RouterHealth | None, GuardActed | None]:
        """Moves the bias by the step's load, and looks at the router when it is time to.

        Returns the look, and what the guard decided; in force already, save `rollback`, `reset` and `stop`.
        """
        self._move_bias(counts_LE)
        self.routed_LE = self.routed_LE + counts_LE
        if not due(self.settings.guard, step=step):
            return None, None
        # The first rank's look counts: kernels on another may round a number to the other side of a threshold.
        health = self.ranks.tell(look(self.model, self.watch, self.probe, self.reference, step=step))
        self.guard = remember(self.guard, health)
        verdict = judge(
            self.settings.guard,
            self.first,
            self.guard.recent,
            top_k=self.top_k,
            experts=self.experts,
            inflation=self.reference.inflation,
            moe_layers=[router.layer for router in self.routers],
        )
        acted, self.guard = decide(self.settings, self.guard, verdict)
        self._take_effect()
        return health, acted

    def silent_experts(self) -> dict[int, list[int]]:
        """Layer -> experts that never got a token in this run."""
        return never_routed(self.routed_LE.tolist(), [router.layer for router in self.routers])

    def remember(self, guard: GuardState) -> None:
        """What the guard knew before a rollback: the weights go back, its actions stay done."""
        self.guard = guard
        self._take_effect()

    def reset(self, optimizer: torch.optim.Optimizer, owned: Named) -> None:
        """The routers' weights of step 0, and no memory of their gradients. `owned`: what the optimizer updates."""
        for parameter, first in zip(self._trained, self._untrained, strict=True):
            parameter.data.copy_(first)
        for name in self.parameters:
            if name in owned:
                optimizer.state.pop(owned[name], None)

    def _move_bias(self, counts_LE: Tensor) -> None:
        """DeepSeek's loss-free balancing: a step of fixed size towards the experts with less than the mean load.

        Centred, as torchtitan does, so that the biases do not wander off together (arXiv 2408.15664).
        """
        rate = in_force(self.settings, self.guard).bias_rate
        for router, counts_E in zip(self.routers, counts_LE, strict=True):
            if rate and router.bias_E is not None:
                load_E = counts_E.to(router.bias_E.device).float()
                step_E = rate * (load_E.mean() - load_E).sign()
                router.bias_E.data += (step_E - step_E.mean()).to(router.bias_E.dtype)

    def _take_effect(self) -> None:
        now = in_force(self.settings, self.guard)
        self.loss.balance = now.balance
        for parameter in self._trained:
            parameter.requires_grad_(now.trains)
            if not now.trains:
                parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        found = {f"{BIAS}{r.layer}": r.bias_E.detach().cpu() for r in self.routers if r.bias_E is not None}
        found[ROUTED] = self.routed_LE
        if self.loss.share_LE is not None:
            found[SHARE] = self.loss.share_LE.cpu()
        return found

    def restore(self, tensors: dict[str, Tensor], guard: dict[str, Any]) -> None:
        """Takes up the state that `tensors` and `guard_json` gave."""
        self.loss.share_LE = tensors.get(SHARE)
        self.routed_LE = tensors[ROUTED]
        for router in self.routers:
            if router.bias_E is not None:
                router.bias_E.data.copy_(tensors[f"{BIAS}{router.layer}"])
        self.guard = replace(state_from_json(guard), first=self.first)
        self._take_effect()

    def guard_json(self) -> dict[str, Any]:
        return state_to_json(replace(self.guard, first=None))
