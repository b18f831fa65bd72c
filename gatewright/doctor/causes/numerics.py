"""Numbers that stopped being numbers, or stopped changing: NaN, loss scale, loss or gradient exactly zero."""

import re

from gatewright.doctor.cause import Cause, Log, Role, Seen, plain_finding, run_key, sign
from gatewright.doctor.knobs import knobs
from gatewright.spec.finding import Finding

_NAN = r"(?i:nan|inf)\b"


def not_a_number(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """NaN, with the setting that is tried first; a gradient alone may be one skipped step."""
    if all(_only_gradient(sighting.line) for sighting in seen.sightings):
        text = "The gradient norm is not a number in some steps while the loss still is: skipped steps, or damage done."
        return plain_finding(cause, seen, log, text=text, changes=knobs(log.tool, "lower_lr"))
    if "flash_attn" in log.kinds:
        fix = ("The log also shows a problem of the attention kernel: run once with sdpa or eager.", *cause.fix)
        return plain_finding(cause, seen, log, fix=fix, changes=knobs(log.tool, "lower_lr"))
    return plain_finding(cause, seen, log, changes=knobs(log.tool, "lower_lr"))


def _only_gradient(line: str) -> bool:
    """Whether a step line has a finite loss, not zero, beside a gradient norm that is not a number."""
    loss = re.search(r"'loss': '?([\d.e+-]+)", line)
    return loss is not None and loss[1].strip("0.") != "" and "nan" in line


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW574",
        name="loss-not-a-number",
        kind="loss_nan",
        title="Loss or gradient is NaN or infinite",
        signs=(
            sign(
                "nan",
                "NaN",
                "inf",
                "Infinity",
                pattern=(
                    (
                        r"['\"]?(?P<what>[\w/ ]*(?:[Ll]oss|LOSS|grad[_ ]?norm|logits|perplexity|"
                        r"rewards?[\w/]*))['\"]?\s*[:=|"
                        r"]\s*['\"]?-?"
                    )
                    + _NAN
                ),
            ),
            sign(
                "nan",
                "NaN",
                pattern=(
                    r"(?:[Ll]oss|[Gg]rad(?:ient)?s?(?: norm)?|[Oo]utputs?|[Ll]ogits|[Aa]ctivations?|weights?|SDPA|"
                    r"[Aa]ttention)\b.{0,40}\b(?:is|are|was|became|becomes|returns?|contains?|produc\w+|has|have|have "
                    r"become|went|turned|goes|go)\s+(?:to |all |a )?(?:NaN|nan)"
                ),
            ),
            sign(
                "found NaN",
                "found Inf",
                "NaN or Inf found",
                "NaN or inf found",
                "returned nan values",
                "found nan",
                pattern=(
                    r"found (?:NaN|Inf|nan)|(?:NaN|nan) or (?:Inf|inf) found|Function '(?P<function>\w+)' returned "
                    r"nan values"
                ),
            ),
            sign(
                "probability tensor contains",
                "Non-finite loss",
                "non-finite",
                "Nonfinite",
                "not finite",
                pattern=(
                    r"probability tensor contains either|[Nn]on-?finite (?:loss|grad|norm)|(?:loss|norm) is not "
                    r"finite|total norm .* is non-finite"
                ),
            ),
            sign("loss nan", "loss inf", "gradient norm nan", "gradient norm inf", "loss -inf"),
            sign("Loss is nan", "loss is nan", "nan loss", "NaN loss", "Loss is NaN", "loss became NaN"),
        ),
        text="The loss or the gradient is not a number any more: every weight it touched is lost.",
        why="Too large a learning rate, fp16 overflow, an attention kernel that returns NaN for fully masked "
        "rows or on this "
        "GPU, samples without a single label, or router logits that grew. A trainer that filters NaN logs 0.0 instead.",
        fix=(
            "Go back to the last checkpoint before it; then run the failing batch once with attention sdpa "
            "or eager to tell "
            "the kernel from the optimisation.",
            "Lower the learning rate, warm up, clip gradients; bf16 instead of fp16; drop samples without labels.",
        ),
        judge=not_a_number,
        outranks=2,
    ),
    Cause(
        code="GW575",
        name="loss-scale-exhausted",
        kind="loss_nan",
        title="The loss scale fell to its minimum",
        confidence="likely",
        signs=(
            sign(
                "loss scale already at minimum", "Current loss scale already at minimum", "Minimum loss scale reached"
            ),
            sign(
                "OVERFLOW",
                "Gradient overflow",
                pattern=(
                    r"OVERFLOW! Rank \d+ Skipping step\. Attempted loss scale: 1(?:\.0)?,|Gradient overflow.*reducing "
                    r"loss scale to (?:1(?:\.0)?|0?\.\d+|\d(?:\.\d+)?e-\d+)\s*$"
                ),
            ),
        ),
        text="Every step overflowed until the loss scale reached its minimum: the gradients are not finite.",
        why=(
            "fp16 gradients overflow; a few skipped steps at the start are normal, all of them are NaN by another name."
        ),
        fix=("Train in bf16; else lower the learning rate and look at the data of the first overflow.",),
        changes=(run_key("model.dtype", "bfloat16"),),
        outranks=3,
    ),
    Cause(
        code="GW576",
        name="gradient-zero",
        kind="loss_zero_grad",
        title="The gradient is exactly zero",
        severity="error",
        role=Role.ROOT,
        confidence="possible",
        text="The gradient norm is exactly 0: nothing trains.",
        why="Every label is masked, no trainable weight is in the graph (adapter on modules that never run, re-entrant "
        "checkpointing without input gradients), or the learning rate is 0 by schedule.",
        fix=(
            "Print the trainable parameters and one batch's labels; at least one label must not be -100.",
            "With re-entrant checkpointing call enable_input_require_grads, or use use_reentrant=False.",
        ),
    ),
    Cause(
        code="GW577",
        name="loss-zero",
        kind="loss_zero_grad",
        title="The loss is exactly zero",
        severity="error",
        role=Role.ROOT,
        confidence="possible",
        signs=(sign("labels", pattern=r"[Aa]ll (?:the )?labels .{0,60}-100\b"),),
        text="The loss is exactly 0: no label counts, or NaN was filtered from the log.",
        why="All labels are masked (template and response mark do not match, samples cut before the answer), "
        "or the trainer "
        "replaces NaN by 0 (logging_nan_inf_filter).",
        fix=(
            "Look at the labels of one batch; check the response template against the rendered text.",
            "Set logging_nan_inf_filter=false to see NaN.",
        ),
    ),
    Cause(
        code="GW582",
        name="no-gradient",
        kind="loss_zero_grad",
        title="The loss has no gradient",
        confidence="certain",
        signs=(
            sign(
                "does not require grad",
                pattern=r"element 0 of tensors does not require grad|does not require grad and does not have a grad_fn",
            ),
            sign("None of the inputs have requires_grad=True", "Gradients will be None"),
            sign(
                "optimizer got an empty parameter list",
                "trainable params: ",
                pattern=r"optimizer got an empty parameter list|trainable params: 0\b",
            ),
            sign("No inf checks were recorded"),
        ),
        text="No trainable weight is connected to the loss.",
        why=(
            "Everything is frozen, the adapter matched no module, or re-entrant checkpointing got inputs "
            "without gradient."
        ),
        fix=(
            "Print which weights train; name target modules that exist.",
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or enable_input_require_grads().",
        ),
        outranks=3,
    ),
)
