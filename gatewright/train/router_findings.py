"""What a run's router settings amount to, said before step 1: in our scale, in others', and what they cannot do."""

import torch

from gatewright.model.experts import find_experts
from gatewright.router.health import LEAST_EVIDENCE, evidence, evidence_tokens
from gatewright.spec.errors import RunFileError
from gatewright.spec.event import Finding
from gatewright.train.router import RouterControl

OVER = {"global": "the whole step", "sequence": "each document", "micro": "each micro-batch"}
MATTERS = 1e-3
"""Share of dropped assignments above which the finding is a warning."""


def router_findings(control: RouterControl, *, ep: int) -> list[Finding]:
    """Raises RunFileError for a bias update on routers that have no bias."""
    settings, layers = control.settings, len(control.routers)
    found = []
    if settings.balance:
        text = (
            f"router.balance {settings.balance:g} weighs the mean over {layers} layers of E·Σ f·P (1 when balanced, f "
            f"over {OVER[settings.balance_over]}). The same pull is router_aux_loss_coef "
            f"{settings.balance / control.top_k:.3g} in transformers (top_k when balanced; pooled over layers, so only "
            f"where all layers agree) and moe_aux_loss_coeff {settings.balance / layers:.3g} in Megatron-Core (1 when "
            "balanced; summed over layers)"
        )
        found.append(Finding(severity="note", text=text))
    if settings.z:
        text = (
            f"router.z {settings.z:g} weighs the mean over {layers} layers and all tokens of logsumexp²; the same is "
            f"moe_z_loss_coeff {settings.z / layers:.3g} in Megatron-Core, which sums over layers"
        )
        found.append(Finding(severity="note", text=text))
    if (settings.balance or settings.z) and not control.guard.trains:
        text = "the router is frozen: router.balance and router.z reach only the weights that feed it"
        found.append(Finding(severity="warning", text=text))
    if control.guard.trains and not (settings.balance or settings.bias_rate):
        text = "the router trains with nothing that balances it: router.balance and router.bias_rate are 0"
        found.append(Finding(severity="note", text=text))
    idle = [a for a in settings.guard.action if a in ("lower_lr", "freeze", "reset")]
    if idle and not control.guard.trains:
        text = f"router.guard: {', '.join(idle)} will change nothing, since the router is frozen"
        found.append(Finding(severity="note", text=text))
    wants_bias = "router.bias_rate" if settings.bias_rate else "router.guard.action: bias"
    if (settings.bias_rate or "bias" in settings.guard.action) and not control.has_bias:
        raise RunFileError(
            f"{wants_bias}: the routers of {type(control.model).__name__} have no e_score_correction_bias to move; "
            "leave it out, or use balance"
        )
    if settings.guard.action:
        found += _evidence(control)
    if settings.capacity != "dropless":
        found.append(_outlook(control, settings.capacity, ep=ep))
    return found


def _evidence(control: RouterControl) -> list[Finding]:
    """Says so where the probe is too small to call an expert dead, which makes red impossible."""
    shape = {"top_k": control.top_k, "experts": control.experts, "inflation": control.reference.inflation}
    tokens = sum(batch.tokens for batch in control.probe)
    if evidence(tokens, **shape) >= LEAST_EVIDENCE:
        return []
    wanted = evidence_tokens(**shape)
    text = (
        f"router.guard: no expert can be called dead on a probe of {tokens:,} tokens (it takes {wanted:,}): the guard "
        "will never see red. Raise router.guard.probe_tokens, and every_steps, since a look may take 2 % of the time"
    )
    return [Finding(severity="warning", text=text)]


def _outlook(control: RouterControl, factor: float, *, ep: int) -> Finding:
    """What this factor drops at least: Σ (q - CF / pools)+ over the probe's loads q, however long the context is."""
    per_rank = control.settings.capacity_per == "rank"
    counts_LE = control.reference.counts_LE.double()
    share_LE = counts_LE / counts_LE.sum(dim=1, keepdim=True)
    pools = ep if per_rank else share_LE.shape[1]
    experts = find_experts(control.model)
    order_LE = torch.tensor([experts[router.layer].gatewright_order for router in control.routers])
    share_LP = share_LE.gather(1, order_LE.to(share_LE.device)).view(len(share_LE), pools, -1).sum(dim=2)
    drop_L = (share_LP - factor / pools).clamp(min=0).sum(dim=1)
    worst = int(torch.argmax(drop_L))
    text = (
        f"router.capacity {factor:g} per {control.settings.capacity_per}: by the probe's loads at least "
        f"{drop_L.mean():.2%} of all assignments will be dropped, {drop_L[worst]:.2%} in layer "
        f"{control.routers[worst].layer}; `gatewright router capacity` finds the factor for a bound"
    )
    return Finding(severity="warning" if drop_L[worst] > MATTERS else "note", text=text)
