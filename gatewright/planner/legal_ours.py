"""Rules of our own trainer: what train/setup.py and the proof of train/context.py refuse, said before a run starts."""

from collections import Counter

from gatewright.planner.legal_rule import Rules, Setting
from gatewright.spec.shape import AttentionKind

VERSION = "Gatewright 0"
OURS = Rules()

PAST_THE_SEAM: dict[AttentionKind, str] = {
    "linear": "carries a state along the document",
    "chunked": "counts positions in chunks",
    "sparse_latent": "chooses keys by an indexer",
    "compressed": "compresses keys over a stretch of tokens",
}
"""Kinds of attention that look along a document in another way than by its keys and values."""
CHANGED_SCORES = {"gpt_oss": "attention sinks", "gemma2": "soft-capped scores"}
"""Families whose attention is not that of a plain kernel, and what it has."""


@OURS.rule(
    "cp-past-the-seam",
    title="layers that carry something along a document over ranks",
    version=VERSION,
    source="proof before step 1, docs/context_parallel.md",
    backends=("gatewright",),
)
def cp_past_the_seam(at: Setting) -> str:
    if at.job.layout.cp == 1:
        return ""
    shape = at.job.shape
    kinds = Counter(layer.attention.kind for layer in shape.layers if layer.attention is not None)
    for kind, does in PAST_THE_SEAM.items():
        if kinds[kind]:
            return (
                f"cp {at.job.layout.cp}: {kinds[kind]} of the {len(shape.layers)} layers of {shape.name} have "
                f"{kind.replace('_', ' ')} attention, which {does}, and would need the part that another rank holds; "
                "use cp 1"
            )
    return ""


@OURS.rule(
    "cp-changed-scores",
    title="sinks and soft caps over ranks",
    version=VERSION,
    source="attention seam, docs/context_parallel.md",
    backends=("gatewright",),
)
def cp_changed_scores(at: Setting) -> str:
    found = CHANGED_SCORES.get(at.job.shape.family)
    if at.job.layout.cp == 1 or found is None:
        return ""
    return f"cp {at.job.layout.cp}: {at.job.shape.name} has {found}, which are not proved over ranks; use cp 1"


@OURS.rule(
    "eight-bit-state-divided",
    title="8-bit optimizer state divided over ranks",
    version=VERSION,
    source="train/setup.py: state in blocks",
    backends=("gatewright",),
)
def eight_bit_state_divided(at: Setting) -> str:
    layout = at.job.layout
    if at.job.optimizer != "adamw_8bit" or (layout.ep == 1 and layout.sharding == "none"):
        return ""
    what = f"ep {layout.ep}" if layout.ep > 1 else layout.sharding
    return f"adamw8bit keeps its state in blocks that {what} cannot divide; use adamw, or ep 1 with replicated weights"


@OURS.rule(
    "full-beside-adapter-sharded",
    title="weights that train in full beside an adapter, sharded",
    version=VERSION,
    source="train/setup.py",
    backends=("gatewright",),
)
def full_beside_adapter_sharded(at: Setting) -> str:
    adapter, sharding = at.job.adapter, at.job.layout.sharding
    if adapter is None or not adapter.full or sharding not in ("fsdp2", "zero3"):
        return ""
    return f"{', '.join(sorted(adapter.full))} in full beside an adapter cannot be sharded by zero3; use zero2"


@OURS.rule(
    "expert-subset-with-ep",
    title="adapters of some experts with EP",
    version=VERSION,
    source="train/setup.py",
    backends=("gatewright",),
)
def expert_subset_with_ep(at: Setting) -> str:
    adapter, ep = at.job.adapter, at.job.layout.ep
    if ep == 1 or adapter is None or "routed_experts" not in adapter.roles - adapter.partly:
        return ""
    share = min((part for (role, _), part in adapter.shares.items() if role == "routed_experts"), default=1.0)
    if share == 1.0:
        return ""
    return f"adapters on {share:.0%} of the experts are not proved with ep {ep}; use ep 1, or adapt every expert"
