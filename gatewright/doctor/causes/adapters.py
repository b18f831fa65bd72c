"""Adapters: keys that match nothing, experts that do not train, merges that fail."""

import re

from gatewright.doctor.cause import Cause, Log, Role, Seen, plain_finding, sign
from gatewright.spec.finding import Finding

_ADAPTER = re.compile(r"peft|lora|adapter", re.IGNORECASE)
_EXPERT = re.compile(r"experts?\b|gate_up_proj|w13|moe", re.IGNORECASE)


def adapter_near(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """A shape error, where the lines around it speak of adapters."""
    for sighting in seen.sightings:
        text = "\n".join((*sighting.before[-60:], sighting.line, *sighting.after[:6]))
        if _ADAPTER.search(text):
            return plain_finding(cause, seen, log, confidence="likely" if _EXPERT.search(text) else "possible")
    return None


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW588",
        name="adapter-keys",
        kind="peft_moe_keys",
        title="The adapter's tensors do not belong to this model",
        signs=(
            sign(
                "lora_",
                "base_model.model",
                pattern=(
                    r"size mismatch for \S*lora_[AB]|(?:[Mm]issing|[Uu]nexpected) (?:adapter )?keys?.{0,400}lora_|"
                    r"lora_[AB].{0,160}(?:not found|mismatch|unexpected|missing|does not exist|[Cc]ould not)"
                    r"|KeyError: '?\S*(?:lora_[AB]|base_model\.model\.\S*experts)"
                ),
            ),
            sign("PeftModel", pattern=r"Error\(s\) in loading state_dict for Peft\w+"),
            sign("expected target modules in", pattern=r"expected target modules in .*but received"),
            sign(
                "experts",
                pattern=(
                    r"(?:KeyError|[Uu]nexpected key|[Mm]issing key|not found|size mismatch|[Cc]an ?not|unsupported|is "
                    r"not supported).{0,200}experts\.(?:\d+|gate_up|down|base_layer|gate_proj|up_proj)|"
                    r"experts\.\S+.{0,160}(?:not found|mismatch|unexpected|is not supported|missing|unsupported)"
                ),
            ),
            sign(
                "Found missing adapter keys",
                "missing adapter keys",
                "unexpected keys while loading",
                "adapter weights",
                pattern=r"missing adapter keys|[Aa]dapter weights.*(?:mismatch|not match|unexpected|missing)",
            ),
            sign(
                "is not supported",
                pattern=(
                    r"target_modules? .*(?:lm_head|experts|router|gate).*is not supported|(?:unsupported|not "
                    r"supported) LoRA (?:weight|module|target)"
                ),
            ),
        ),
        text="The adapter's tensors do not fit this model: names or shapes of the (fused) experts differ.",
        why="transformers fused the experts of most MoE models, PEFT changed how it writes them (0.18, "
        "0.19), and servers read "
        "them in their own way: transposed, per expert, or not at all.",
        fix=("Load it with the versions that wrote it and merge it there; ship the merged weights.",),
        outranks=5,
    ),
    Cause(
        code="GW563",
        name="adapter-shapes",
        kind="peft_moe_keys",
        title="Shapes that do not fit inside an adapter",
        signs=(
            sign(
                "The size of tensor a",
                "must match the size of tensor b",
                "shapes cannot be multiplied",
                "contraction dimension of mat_a",
                pattern=(
                    r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)|mat1 and "
                    r"mat2 shapes cannot be multiplied \((?P<mat1>[\dx]+) and (?P<mat2>[\dx]+)\)|contraction "
                    r"dimension of mat_a"
                ),
            ),
        ),
        text="Two shapes inside an adapter do not fit; with fused experts, its matrices are read transposed.",
        why="Fused experts are [experts, in, out] in some versions and [experts, out, in] in others.",
        fix=("Merge with the version that wrote the adapter, or use one with the fix.",),
        judge=adapter_near,
        outranks=1,
    ),
    Cause(
        code="GW589",
        name="adapter-matches-nothing",
        kind="peft_moe_untrained",
        title="Targets that match nothing",
        signs=(
            sign(
                "not found in the base model", pattern=r"Target (?:modules?|parameters?) .* not found in the base model"
            ),
            sign(
                "target_parameters",
                "target_modules",
                "target_parameter",
                pattern=(
                    r"(?:target_(?:modules|parameters?)).{0,160}(?:were not|was not|not found|no match|did not match|"
                    r"not supported|match(?:es|ed)? no|ignored|could not be|fail)|(?:were not|not found|No modules? "
                    r"(?:were )?(?:targeted|matched)|did not match|ignored).{0,160}target_(?:modules|parameters?)"
                ),
            ),
            sign("No modules were targeted", "Please specify `target_modules`", "No module was matched"),
            sign(
                "experts",
                pattern=(
                    r"experts? (?:are|were|will|is|stay|remain)\s?(?:be |left )?(?:not (?:be )?trained|frozen|not "
                    r"adapted|untouched|untrained)|(?:no|without) (?:LoRA|adapter) (?:on|for) .*experts"
                ),
            ),
            sign(
                "ParamWrapper",
                pattern=(
                    r"ParamWrapper.*(?:does not|not support|must be)|"
                    r"lora_dropout.*(?:target_parameters|ParamWrapper)"
                ),
            ),
        ),
        text="The adapter's targets match no weight, or leave the experts out.",
        why="Fused experts are parameters, not modules: target_modules cannot reach them, target_parameters can.",
        fix=(
            "Print the trainable weights by role before step 1; name experts by target_parameters "
            "(mlp.experts.gate_up_proj, mlp.experts.down_proj).",
        ),
        outranks=6,
    ),
    Cause(
        code="GW564",
        name="merge-of-quantised-base",
        kind="merge",
        title="Merging into quantised weights",
        role=Role.HINT,
        severity="warning",
        signs=(
            sign("Merge lora module to", pattern=r"Merge lora module to \d-bit linear may get different generations"),
            sign(
                "merge",
                "Merging",
                pattern=(
                    r"[Cc]annot merge .*(?:quantized|4-?bit|8-?bit|gptq|awq)|[Mm]erging .*(?:4-?bit|"
                    r"8-?bit).*(?:rounding|not supported|lose)"
                ),
            ),
        ),
        text="An adapter is merged into quantised weights: most of its update is rounded away.",
        why="The step of 4-bit weights is larger than a typical update.",
        fix=("Merge into the 16-bit base, in fp32, then quantise.",),
        outranks=2,
    ),
)
