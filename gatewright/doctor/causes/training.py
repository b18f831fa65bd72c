"""The training step itself: recomputation that differs, parameters left unused, versions that do not fit."""

import re

from gatewright.doctor.cause import Cause, Log, Role, Seen, plain_finding, sign
from gatewright.spec.finding import Finding

_SHAPES = re.compile(r"saved metadata: \{'shape': torch\.Size\(\[([\d, ]*)\]\)|saved \[([\d, ]*)\]")
_AGAIN = re.compile(r"recomputed metadata: \{'shape': torch\.Size\(\[([\d, ]*)\]\)")


def recomputed(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """Why the recomputed activations differ, by how their shapes do."""
    text = "\n".join((*seen.first.before[-4:], seen.first.line, *seen.first.after[:24]))
    saved, again = _SHAPES.search(text), _AGAIN.search(text)
    reason, fix = _reason(_sizes(saved), _sizes(again)) if saved and again else ("", ())
    return plain_finding(
        cause,
        seen,
        log,
        text=f"The backward pass recomputed other activations than the forward pass made{reason}.",
        fix=(*fix, *cause.fix),
        confidence="likely" if reason else cause.confidence,
        numbers=(("saved", _shown(saved)), ("recomputed", _shown(again))) if saved and again else (),
    )


def _sizes(found: re.Match[str] | None) -> list[int]:
    text = next((group for group in (found.groups() if found else ()) if group is not None), "")
    return [int(part) for part in text.split(",") if part.strip().isdecimal() and len(part) < 19]


def _shown(found: re.Match[str] | None) -> str:
    return str(_sizes(found))


def _reason(saved: list[int], again: list[int]) -> tuple[str, tuple[str, ...]]:
    if 0 in again and 0 not in saved:
        return (
            f" ({again} for {saved}): a parameter was empty when it was used again, as ZeRO-3 leaves frozen ones",
            ("Use ZeRO-2, or a DeepSpeed with the fix for frozen parameters; or use_reentrant=True.",),
        )
    differing = [(a, b) for a, b in zip(saved, again, strict=False) if a != b]
    if len(differing) == 1:
        a, b = differing[0]
        if a == 2 * b or b == 2 * a or (min(a, b) > 0 and max(a, b) % min(a, b) == 0 and max(a, b) // min(a, b) <= 64):
            return (
                f" ({b} for {a}): one is a whole multiple of the other, as when context or sequence parallelism "
                "is on in the forward pass only",
                ("Run the backward pass inside the same context-parallel context as the forward pass.",),
            )
        return (
            f" ({b} for {a}): a few tokens differ, as when the router of a MoE is recomputed and routes them otherwise",
            ("Keep the router's decision out of recomputation (save it), or checkpoint outside the MoE block.",),
        )
    return f" ({again} for {saved})", ()


ZERO3_MOE = Cause(
    code="GW580",
    name="zero3-trace-invalidated",
    kind="zero3_moe_hang",
    title="ZeRO-3 waits for experts that some ranks do not use",
    role=Role.HINT,
    severity="warning",
    confidence="possible",
    signs=(
        sign("Invalidate trace cache", pattern=r"Invalidate trace cache @ step \d+"),
        sign("leaf module", "leaf_module", pattern=r"set_z3_leaf_modules|z3_leaf|leaf modules?"),
    ),
    text="ZeRO-3's order of modules changes from step to step, as with experts that not every rank uses: "
    "ranks may wait "
    "for one another for ever.",
    why="ZeRO-3 gathers a module's weights when it runs. With one module per expert, ranks run different "
    "ones, and their "
    "collectives do not match.",
    fix=(
        "Declare the MoE block a leaf: deepspeed.utils.set_z3_leaf_modules(model, [TheSparseMoeBlock]), or use a model "
        "whose experts are one fused module.",
        "With expert parallelism use ZeRO-2.",
    ),
    source="https://github.com/deepspeedai/DeepSpeed/issues/5006",
)

CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW578",
        name="recomputation-differs",
        kind="checkpoint_recompute",
        title="Activation checkpointing recomputed something else",
        signs=(
            sign(
                "Recomputed values for the following tensors have different metadata",
                "recomputed metadata",
                "have different metadata than during the forward",
            ),
            sign("CheckpointError", pattern=r"torch\.utils\.checkpoint\.?:? ?CheckpointError"),
            sign(
                "A different number of tensors was saved",
                "different number of tensors was saved during the original forward",
            ),
            sign("Unpack is being triggered for a tensor that was already unpacked"),
        ),
        text="The backward pass recomputed other activations than the forward pass made.",
        why="Recomputation must repeat the forward pass. It does not where routing is recomputed with other "
        "numerics, where "
        "ZeRO-3 has let go of frozen parameters, or where context parallelism is on in the forward pass only.",
        fix=("Try use_reentrant=True (or False, the other one), and determinism_check='none' only to learn more.",),
        judge=recomputed,
        outranks=4,
    ),
    Cause(
        code="GW579",
        name="checkpointing-twice",
        kind="checkpoint_recompute",
        title="Backward through a graph twice",
        confidence="possible",
        signs=(
            sign("backward through the graph a second time", "Trying to backward through"),
            sign("marked ready twice", "marked as ready twice", "mark a variable ready only once"),
            sign("modified by an inplace operation"),
        ),
        text="A gradient was computed twice through one graph, or a tensor it needs was changed meanwhile.",
        why="Re-entrant checkpointing under DDP with shared or unused parameters, or a tensor kept from the last step.",
        fix=("gradient_checkpointing_kwargs={'use_reentrant': False}; ddp_find_unused_parameters=False.",),
        outranks=3,
    ),
    Cause(
        code="GW581",
        name="unused-parameters",
        kind="ddp_unused_parameters",
        title="Parameters that took no part in the loss",
        confidence="certain",
        signs=(
            sign("Expected to have finished reduction in the prior iteration"),
            sign(
                "did not receive grad",
                "find_unused_parameters",
                "were not used in producing loss",
                "that were not used in",
                pattern=(
                    r"find_unused_parameters(?!=True was specified)|(?:were|was) not used in producing (?:the )?loss|"
                    r"which did not receive grad"
                ),
            ),
        ),
        text="Some parameters got no gradient on a rank, so the ranks' gradient exchange cannot end.",
        why=(
            "Experts without tokens, a frozen or skipped branch, or an adapter on a module that this batch "
            "does not use."
        ),
        fix=(
            (
                "Freeze what is not used; for experts use fused expert modules, or "
                "ddp_find_unused_parameters=True (slower)."
            ),
        ),
        outranks=4,
    ),
    Cause(
        code="GW513",
        name="ranks-disagree",
        kind="rank_mismatch",
        title="Ranks do not hold the same thing",
        confidence="likely",
        signs=(
            sign(
                "DDP expects same model across all ranks",
                "params with different",
                pattern=(
                    r"DDP expects same model across all ranks|appears not to match (?:sizes|"
                    r"strides) of the same param"
                ),
            ),
            sign(
                "Detected mismatch between collectives on ranks",
                "is running collective",
                "mismatch between collectives",
            ),
        ),
        text="The ranks run different models or different collectives.",
        why="A seed, a file or a branch differs between ranks.",
        fix=("Compare the two ranks named; load the same checkpoint and the same settings on all.",),
        outranks=4,
    ),
    ZERO3_MOE,
    Cause(
        code="GW514",
        name="library-missing",
        kind="library_missing",
        title="A library is missing or does not fit",
        confidence="likely",
        signs=(
            sign("ModuleNotFoundError", "No module named", pattern=r"No module named '(?P<module>[\w.]+)'"),
            sign(
                "ImportError",
                pattern=(
                    r"ImportError: (?P<what>cannot import name .+|lib\S+: cannot open shared object file.*|"
                    r".*undefined symbol.*|.*GLIBC(?:XX)?_.*)"
                ),
            ),
            sign("undefined symbol", "GLIBC", pattern=r"undefined symbol: \S+|version `GLIBC(?:XX)?_[\d.]+' not found"),
        ),
        text="A library is missing, or was built for another version: {module}.",
        why="An environment that was not activated in the job, or extensions built against another torch.",
        fix=("Check that the job activates the environment; install or rebuild the package named.",),
        outranks=1,
    ),
)
