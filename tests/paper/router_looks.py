"""Looks at a router as the guard's tests need them: healthy ones, and a collapse with the course of a measured one."""

from dataclasses import replace

from gatewright.spec.event import RouterHealth

LAYERS, EXPERTS, TOP_K, TOKENS = 4, 16, 2, 4096


def look(
    step: int,
    *,
    kl: float = 0.0,
    overlap: float = 1.0,
    entropy: float = 0.73,
    cv: float = 0.49,
    starved: int = 0,
    dead: int = 0,
    tokens: int = TOKENS,
) -> RouterHealth:
    """A look whose dead and starved experts are all in the last layer, and whose layers are otherwise alike."""
    return RouterHealth(
        step=step,
        tokens=tokens,
        load_cv=[cv] * LAYERS,
        max_violation=[1.0] * LAYERS,
        effective_experts=[0.85] * LAYERS,
        dead=[0] * (LAYERS - 1) + [dead],
        starved=[0] * (LAYERS - 1) + [starved],
        token_entropy=[entropy] * LAYERS,
        top1=[0.4] * LAYERS,
        margin=[0.03] * LAYERS,
        lse2=[5.2] * LAYERS,
        drift=[0.0] * LAYERS,
        overlap=[overlap] * LAYERS,
        kl=[kl] * LAYERS,
        seconds=0.01,
    )


START = look(0)

COLLAPSE = [
    look(10, kl=0.16, overlap=0.74, entropy=0.70, cv=0.50),
    look(20, kl=0.33, overlap=0.63, entropy=0.65, cv=0.55),
    look(30, kl=0.52, overlap=0.57, entropy=0.58, cv=0.62, starved=2),
    look(40, kl=0.70, overlap=0.55, entropy=0.52, cv=0.66, starved=5, dead=1),
    look(50, kl=0.84, overlap=0.54, entropy=0.48, cv=0.70, starved=7, dead=2),
    look(75, kl=1.10, overlap=0.53, entropy=0.41, cv=0.74, starved=9, dead=3),
    look(100, kl=1.30, overlap=0.52, entropy=0.36, cv=0.77, starved=11, dead=4),
    look(300, kl=1.68, overlap=0.51, entropy=0.27, cv=0.80, starved=12, dead=5),
]
"""Fine-tuning with a learning rate ten times too high and no balance loss: begin, first death (step 40) and end are
measured, what is between follows their course."""


def mild(health: RouterHealth, *, share: float) -> RouterHealth:
    """The look moved back towards step 0: with share 0 it shows nothing."""
    between = lambda now, then: [b + share * (a - b) for a, b in zip(now, then, strict=True)]  # noqa: E731
    return replace(
        health,
        kl=between(health.kl, START.kl),
        overlap=between(health.overlap, START.overlap),
        token_entropy=between(health.token_entropy, START.token_entropy),
        load_cv=between(health.load_cv, START.load_cv),
        starved=[int(share * count) for count in health.starved],
        dead=[int(share * count) for count in health.dead],
    )
