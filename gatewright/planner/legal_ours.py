"""Rules of our own trainer: what its setup and its proofs before step 1 refuse, said before a run starts."""

from gatewright.planner.legal_rule import Rules, Setting

VERSION = "Gatewright 0"
OURS = Rules()

CHANGED_SCORES = {"gpt_oss": "attention sinks", "gemma2": "soft-capped scores"}
"""Families whose attention is not that of a plain kernel, and what it has."""


@OURS.rule(
    "cp-through-attention",
    title="CP needs attention that looks along documents through its keys alone",
    version=VERSION,
    source="train/context.py proves it, and refuses others",
    backends=("gatewright",),
)
def cp_through_attention(at: Setting) -> str:
    mixers = [layer.attention for layer in at.job.shape.layers if layer.attention is not None]
    past = [item for item in mixers if item.kind == "linear" or item.index_top_k is not None or item.compression > 1]
    if at.job.layout.cp > 1 and past:
        return (
            f"cp {at.job.layout.cp}: {len(past)} layers of {at.job.shape.name} carry something along a document past "
            "the attention seam (linear attention, an indexer, compressed keys); use cp 1"
        )
    return ""


@OURS.rule(
    "cp-changed-scores",
    title="sinks, soft caps and chunks over ranks",
    version=VERSION,
    source="model/attention.py refuses them, docs/context_parallel.md",
    backends=("gatewright",),
)
def cp_changed_scores(at: Setting) -> str:
    shape = at.job.shape
    chunked = any(layer.attention is not None and layer.attention.kind == "chunked" for layer in shape.layers)
    found = "attention in chunks" if chunked else CHANGED_SCORES.get(shape.family)
    if at.job.layout.cp == 1 or found is None:
        return ""
    return f"cp {at.job.layout.cp}: {shape.name} has {found}, which is not proved over ranks; use cp 1"
