"""A measured row's words → a job of the planner: what each source means by them, and what had to be assumed."""

import re
from dataclasses import replace

from measured_models import find_shape

from gatewright.planner.job import (
    Adapter,
    AttentionKernel,
    Checkpointing,
    Job,
    Layout,
    LossKernel,
    Method,
    Offload,
    Optimizer,
    Sharding,
    Storage,
)
from gatewright.spec.shape import ROLES, ModelShape, TensorGroup, TensorRole

CAP_FILL = 0.6
"""Longest of several samples padded together, as a share of the length cap, where a row only states the cap."""
PADDING_FREE_FILL = 0.15
"""Mean sample as a share of the cap, where a micro-batch holds its samples without padding."""
VISION_PARAMETERS = 0.6e9
"""Of an image tower, where the row does not state the total (Qwen2.5-VL: 0.68e9, SigLIP: 0.43e9)."""
HELLASWAG_TOKENS = 144
"""Longest of a batch of 32: the data's mean is 79 tokens."""
BALANCED = 1.15
"""Tokens of the busiest rank over the mean in pre-training, which has a balance loss."""
LITGPT_ALL_LINEAR = r"^(gemma|phi)"
"""litgpt's config_hub/finetune adapts every linear and the head of these, queries and values of the others; the table
of measured rows does not say so."""
LITGPT_DEVICES = {"phi-2": 2, "stablelm-base-alpha-3b": 2}
"""`devices` of config_hub/finetune/*/full.yaml, where it is fewer than the GPUs of the machine that the row names."""


def number(text: str, default: float | None = None) -> float:
    """The first number of a cell: `8 (1 layer/stage)` is 8."""
    found = re.search(r"\d+(\.\d+)?", text)
    if found is None:
        if default is None:
            raise ValueError(f"no number in {text!r}")
        return default
    return float(found[0])


def job_of(fields: dict[str, str]) -> Job:
    total = number(fields["total_params_b"], 0) or None
    active = number(fields["active_params_b"], 0) or None
    found = find_shape(fields["model"], total_b=total, active_b=active, moe="moe" in fields["arch"])
    if found is None:
        raise ValueError(f"no shape known for {fields['model']!r}, and no size stated")
    method = method_of(fields)
    rows, tokens = batch_of(fields)
    preference = fields["task"] in ("dpo", "simpo", "kto") and fields["packing"] != "packing"
    return Job(
        shape=beside(found.shape, fields),
        method=method,
        framework=policy_of(fields),
        adapter=None if method == "full" else adapter_of(fields),
        frozen=frozen_of(fields),
        storage=storage_of(fields["weight_dtype"], method),
        rows=rows,
        tokens_per_row=tokens,
        token_range=token_range(fields),
        checkpointing=checkpointing_of(fields),
        recompute=recompute_of(fields["grad_ckpt"]),
        attention=attention_of(fields["attention"]),
        loss=loss_of(fields),
        optimizer=optimizer_of(fields["optimizer"] + " " + fields["optim_state_dtype"]),
        accumulate=policy_of(fields) in ("ms-swift", "axolotl", "automodel", "litgpt"),
        compiled=bool(re.search(r"(?<!no)compile", fields["loss_kernel"] + fields["note"])),
        layout=layout_of(fields),
        step_in_backward=("in_bwd" in fields["optimizer"] and "not in" not in fields["optimizer"])
        or fields["grad_dtype"] == "freed per layer",
        offload=offload_of(fields["offload"] + fields["grad_ckpt"] + fields["optimizer"]),
        reference_model=fields["task"] in ("dpo", "kto", "gkd") and method == "full",
        preference=preference,
        imbalance=BALANCED if fields["task"] == "pretrain" else None,
        distillation=fields["task"] == "gkd",
    )


def beside(shape: ModelShape, fields: dict[str, str]) -> ModelShape:
    """The language model with what stands beside it: an image or audio tower, or the small part that trains."""
    trained = re.search(r"([0-9.]+)B trainable", fields["method"])
    if trained:
        extra = float(trained[1]) * 1e9
    elif "vlm" in fields["arch"] or "omni" in fields["model"].lower():
        stated = number(fields["total_params_b"], 0) * 1e9 - shape.parameters
        extra = stated if 0 < stated < 0.3 * shape.parameters else VISION_PARAMETERS
    else:
        return shape
    tower = TensorGroup(role="vision", layer=None, parameters=round(extra))
    return replace(shape, groups=(tower, *shape.groups))


POLICIES = (
    (r"fms.*moe-scattermoe", "fms-moe"),
    (r"fms.*", "fms"),
    (r"ms-swift", "ms-swift"),
    (r"megatron-swift|llama-factory \(mca\)", "megatron-swift"),
    (r"megatron|flagscale", "megatron"),
    (r"torchtitan", "torchtitan"),
    (r"automodel", "automodel"),
    (r"torchtune", "torchtune"),
    (r"litgpt", "litgpt"),
    (r"axolotl", "axolotl"),
    (r"unsloth", "unsloth"),
    (r"fsdp_qlora", "fsdp-qlora"),
    (r"deepspeed", "deepspeed"),
    (r"trl", "trl"),
)


def policy_of(fields: dict[str, str]) -> str:
    name = fields["framework"].lower()
    key = next((key for pattern, key in POLICIES if re.search(pattern, name)), "hf")
    if key == "fms":
        return fms_policy(fields)
    recipe = name.startswith("megatron-bridge") and re.search(r"moonlight|deepseek-v3", fields["model"].lower())
    if recipe or (key == "megatron" and "bf16 m,v + fp32 master" in fields["optim_state_dtype"]):
        return "megatron-precision-aware"
    if key == "torchtitan" and re.search("_202412_|float8nocompile", fields["source"]):
        return "torchtitan-2024"
    if key == "litgpt" and "tutorials/" in fields["source"]:
        return "litgpt-2023"
    if key == "hf" and "peft" in name and "method_comparison" in name:
        return "peft"
    return key


def fms_policy(fields: dict[str, str]) -> str:
    """fms-hf-tuning: transformers 4.44 in a100_80gb.csv, newer in the others; `foak` swaps kernels in."""
    old = "refs/a100_80gb.csv" in fields["source"]
    fused = "foak" in fields["framework"]
    if "fp32 params" in fields["weight_dtype"]:
        return "fms-fp32"
    if "baseline-peft-bnb" in fields["framework"]:
        return "fms-baseline" + ("-4.44" if old else "")
    return "fms" + ("-4.44" if old else "") + ("-foak" if fused else "")


def method_of(fields: dict[str, str]) -> Method:
    text = fields["method"]
    if text.startswith(("full", "partial")):
        return "full"
    return "qlora" if text == "qlora" else "lora"


def frozen_of(fields: dict[str, str]) -> frozenset[TensorRole]:
    if "rest frozen" in fields["method"]:
        return frozenset(ROLES) - {"vision"}
    if "vision frozen" in fields["method"]:
        return frozenset({"vision"})
    return frozenset()


TARGETS: tuple[tuple[str, tuple[TensorRole, ...], tuple[str, ...]], ...] = (
    (r"\bq(_proj)?\b|qkv|q,|attn|attention", ("attention",), ("q_proj", "qkv_proj", "q_a_proj", "q_b_proj")),
    (r"\bk(_proj)?\b|qkv|k,|attn|attention|kv", ("attention",), ("k_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    (r"\bv(_proj)?\b|qkv|v,|attn|attention", ("attention",), ("v_proj",)),
    (r"\bo(_proj)?\b|o,|qkvo|attn|attention|linear_proj|,proj", ("attention",), ("o_proj",)),
    (r"gate|up\b|mlp|fc1|down|all-linear|all linear", ("dense_mlp",), ("gate_proj", "up_proj", "gate_up_proj")),
    (r"down|mlp|fc2|all-linear|all linear", ("dense_mlp",), ("down_proj",)),
)
ALL_LINEAR: tuple[TensorRole, ...] = ("attention", "linear_attention", "dense_mlp", "shared_experts")


def adapter_of(fields: dict[str, str]) -> Adapter:
    text = re.sub(r"\(.*?(default|typical).*?\)", "", fields["target_modules"].lower())
    rank = int(number(fields["lora_r"], 16))
    if policy_of(fields).startswith("litgpt") and re.match(LITGPT_ALL_LINEAR, fields["model"].lower()):
        return Adapter(rank=rank, roles=frozenset((*ALL_LINEAR, "head")), dropout=True)
    experts = "experts" in text and "not nn.linear" not in text and "shared expert" not in text
    if re.search(r"all[- ]linear|^all|linear_qkv,proj,fc1", text) or not text:
        megatron = policy_of(fields).startswith("megatron")
        roles = {*ALL_LINEAR, *(("routed_experts",) if experts or megatron else ())}
        if "not nn.linear" in text:
            roles = {"attention"}
        return Adapter(rank=rank, roles=frozenset(roles))
    roles_found: set[TensorRole] = set()
    names: set[str] = set()
    for pattern, roles_of, leaf_names in TARGETS:
        if re.search(pattern, text):
            roles_found.update(roles_of)
            names.update(leaf_names)
    if "shared expert" in text:
        roles_found.add("shared_experts")
        names.update(("gate_proj", "up_proj", "down_proj"))
    if "linear_attn" in text:
        roles_found.add("linear_attention")
        names.update(("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_a", "in_proj_b", "out_proj"))
    if experts:
        roles_found.add("routed_experts")
        names.update(("gate_up_proj", "down_proj"))
    return Adapter(
        rank=rank,
        roles=frozenset(roles_found or {"attention"}),
        names=frozenset(names) or None,
        dropout=policy_of(fields).startswith("litgpt"),
    )


def storage_of(text: str, method: Method) -> Storage:
    text = text.lower()
    if method == "full" or not text:
        return "bf16"
    if "double" in text:
        return "nf4_double"
    if "nvfp4" in text:
        return "nvfp4"
    if "nf4" in text or "bnb" in text:
        return "nf4"
    if "int4" in text or "gptq" in text or "awq" in text:
        return "int4"
    if "int8" in text and "bf16" not in text:
        return "int8"
    if "fp8" in text and "compute" not in text:
        return "fp8"
    return "bf16"


def batch_of(fields: dict[str, str]) -> tuple[int, int]:
    """Rows and tokens a row of one micro-batch on one rank."""
    text, known = fields["seq_len"], fields["tokens_known"]
    rows = max(1, int(number(fields["micro_batch"], 1)))
    packed = fields["packing"] in ("packing", "sample_packing", "fixed", "fixed length", "fixed?")
    if "hellaswag" in text:
        return rows, HELLASWAG_TOKENS
    if not re.match(r"\s*\d", text):
        cap = re.search(r"max (\d{3,})", text)
        fill = CAP_FILL if fields["packing"] == "no" else PADDING_FREE_FILL
        return rows, int(float(cap[1]) * fill) if cap else 1024
    tokens = int(number(text))
    if "tok/sample" in fields["note"]:
        return rows, int(number(fields["note"].split("~")[-1], tokens))
    if known.startswith("no") and not packed:
        fill = {"no": CAP_FILL, "padding_free": PADDING_FREE_FILL}.get(fields["packing"], CAP_FILL)
        return rows, max(1, int(tokens * (1.0 if rows == 1 else fill)))
    return rows, tokens


def token_range(fields: dict[str, str]) -> tuple[int, int] | None:
    """Where a row only states a cap on the length, or nothing: from a twentieth of it to all of it."""
    known, text = fields["tokens_known"], fields["seq_len"]
    packed = fields["packing"] in ("packing", "sample_packing", "fixed", "fixed length", "fixed?")
    if "hellaswag" in text:
        return HELLASWAG_TOKENS // 2, HELLASWAG_TOKENS * 3 // 2
    if (known.startswith("no") and not packed) or not re.match(r"\s*\d", text):
        cap = int(number(text.replace(",", ""), 2048)) if re.search(r"\d{3}", text) else 2048
        return max(1, cap // 20), cap
    return None


def checkpointing_of(fields: dict[str, str]) -> Checkpointing:
    text = fields["grad_ckpt"].lower()
    if text == "unstated" and policy_of(fields) == "torchtitan":
        return "per_op"  # the default of its configs
    if "every 2nd" in text:
        return "alternate"
    if text.startswith(("none", "expert-fc1", "recipe")):
        return "none"
    if recompute_of(text) or re.search(r"selective ?(\(core_attn\)|\[\]|core_attn)", text):
        return "none"
    if text.startswith(("selective", "unstated (config default, likely selective)", "config default")):
        return "per_op"
    return "full"


def recompute_of(text: str) -> frozenset[str]:
    """Module names of Megatron's selective recomputation."""
    if "selective" not in text:
        return frozenset()
    return frozenset(re.findall(r"moe_act|mla_up_proj|layernorm|\bmlp\b|\bmoe\b", text))


def attention_of(text: str) -> AttentionKernel:
    text = text.lower()
    if ("eager" in text and "fa2" not in text) or "unfused" in text:
        return "eager"
    return "sdpa" if "sdpa" in text and "flash" not in text else "flash"


def loss_of(fields: dict[str, str]) -> LossKernel:
    text = fields["loss_kernel"].lower()
    if "liger" in text or "cut cross" in text or "linear" in text or "unsloth" in text:
        return "linear"
    if "chunked" in text:
        return "chunked"
    if "fast" in text or "fused" in text:
        return "fused"
    return "full"


def optimizer_of(text: str) -> Optimizer:
    text = text.lower()
    if "muon" in text:
        return "muon"
    if "4bit" in text:
        return "adamw_4bit"
    if "8bit" in text or "int8" in text:
        return "adamw_8bit"
    return "adamw"


SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    ("megatron-fsdp", "fsdp2"),
    ("no_shard", "none"),
    ("fsdp2", "fsdp2"),
    ("fsdp1", "fsdp1"),
    ("zero3", "zero3"),
    ("zero2", "zero2"),
    ("zero-1", "zero1"),
    ("device_map", "pipeline_naive"),
)


def layout_of(fields: dict[str, str]) -> Layout:
    text = fields["zero_or_fsdp"].lower()
    tp, pp = int(number(fields["tp"], 1)), int(number(fields["pp"], 1))
    ep, etp = int(number(fields["ep"], 1)), int(number(fields["etp"], 1))
    cp_text = fields["cp_or_sp"]
    cp = int(number(cp_text, 1)) if re.search(r"cp|ulysses", cp_text.lower()) else 1
    known = fields["world_size"].isdigit()
    if policy_of(fields).startswith("litgpt") and fields["method"] == "full":
        fields = {**fields, "world_size": str(LITGPT_DEVICES.get(fields["model"], fields["world_size"]))}
    world = int(fields["world_size"]) if known else int(number(fields["world_size"], tp * pp * max(1, ep // tp) * 2))
    if "device_map" in text:
        pp = world
    sharding: Sharding = next((value for key, value in SHARDINGS if key in text), "none")
    return Layout(
        ranks=max(world, tp * pp * cp),
        sharding=sharding,
        tp=tp,
        sequence_parallel="SP(TP)" in cp_text,
        ep=ep,
        etp=etp,
        pp=pp,
        virtual_stages=int(number(fields["vpp"], 1)) if fields["vpp"] else 1,
        cp=cp,
    )


def offload_of(text: str) -> frozenset[Offload]:
    text = text.lower()
    found: set[Offload] = set()
    if "expert" in text and "fc1" not in text:
        found.add("experts")
    elif "optimizer" in text:
        found.add("optimizer")
    elif "cpu" in text or "zero3_offload" in text or "params" in text:
        found.update(("weights", "optimizer"))
    if "paged" in text:
        found.add("optimizer")
    if "activations" in text or "unsloth offloaded" in text:
        found.add("activations")
    return frozenset(found)
