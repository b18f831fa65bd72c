"""How long ranks wait for each other because micro-batches of unlike cost meet in a step, and what would help."""

from transformers import PretrainedConfig

from gatewright.packing.alike import alike_in_steps, idle_share
from gatewright.packing.cost import device_rates
from gatewright.packing.epoch import EpochPlan
from gatewright.parallel.ranks import Ranks
from gatewright.spec.event import Finding
from gatewright.train.context import costs_of
from gatewright.train.device import device_name

WORTH_SAYING = 0.02
"""Share of the ranks' time that advice has to save."""


def advice_on_waiting(plan: EpochPlan, config: PretrainedConfig, per_step: int, *, ranks: Ranks) -> Finding | None:
    """What `data.alike` would save, where it is off and saves something."""
    if plan.alike_per_step is not None or per_step < ranks.size:
        return None
    costs = costs_of(config, rates=device_rates(device_name(ranks.device)))
    if not costs.attention_s:
        return None
    knee_tokens, packs = int(costs.token_s / costs.attention_s), plan.packs(0)
    alike = alike_in_steps(packs, plan.lengths, per_step=per_step, seed=[plan.seed, 0, 1], knee_tokens=knee_tokens)
    now, then = (idle_share(order, plan.lengths, ranks=ranks.size, knee_tokens=knee_tokens) for order in (packs, alike))
    if now - then < WORTH_SAYING:
        return None
    return Finding(
        severity="note",
        text=f"micro-batches of unlike cost meet in a step: {ranks.size} ranks wait {now:.0%} of the time by the cost "
        f"model; data.alike: true puts those of like cost together, and they wait {then:.0%}",
    )
