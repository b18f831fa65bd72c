"""Rules that work when broken, though something else is better."""

from gatewright.planner.legal_rule import Rules, Setting

SHARDS_WEIGHTS = ("zero3", "fsdp1", "fsdp2")
ADVICE = Rules()


@ADVICE.rule(
    "four-bit-with-fsdp",
    title="sharding 4-bit weights",
    version="bitsandbytes 0.43 and later",
    source="PEFT docs, FSDP-QLoRA",
    backends=("transformers", "deepspeed", "deepspeed-autoep", "fsdp1", "fsdp2"),
)
def four_bit_with_fsdp(at: Setting) -> str:
    if at.job.storage in ("nf4", "nf4_double") and at.job.layout.sharding in SHARDS_WEIGHTS:
        return (
            "4-bit weights are sharded only if they are stored in the compute type: set bnb_4bit_quant_storage to "
            "bfloat16 (bitsandbytes 0.43 and later), else every rank keeps them whole"
        )
    return ""


@ADVICE.rule(
    "fp8-without-units",
    title="fp8 weights on a GPU without fp8 units",
    version="all versions",
    source="data sheets",
)
def fp8_without_units(at: Setting) -> str:
    if at.job.storage in ("fp8", "mxfp8") and at.cluster.gpu.fp8_flops_per_s is None:
        return (
            f"{at.cluster.gpu.title} has no fp8 matrix units: fp8 weights are widened to bf16 for every product, "
            "one matrix at a time"
        )
    return ""


@ADVICE.rule(
    "ep-across-nodes",
    title="EP across slow links",
    version="all versions",
    source="link rates of the catalogue",
)
def ep_across_nodes(at: Setting) -> str:
    layout, per_node = at.job.layout, at.cluster.node.gpus
    if layout.ep > per_node:
        gpu = at.cluster.gpu
        inside, outside = gpu.link_bytes_per_s / 1e9, gpu.network_bytes_per_s / 1e9
        return (
            f"ep {layout.ep} leaves the node of {per_node} GPUs: its all-to-all runs at {outside:g} GB/s instead of "
            f"{inside:g} ({inside / outside:.0f} × slower)"
        )
    return ""


@ADVICE.rule(
    "ep-or-gather",
    title="EP or gather",
    version="bf16, frozen experts",
    source="8 T k H against 12 E H I bytes",
)
def ep_or_gather(at: Setting) -> str:
    """EP moves 8 T k H bytes a layer and micro-batch, gathering frozen experts 12 E H I: equal at T = 1.5 E I / k."""
    job = at.job
    moe = next((layer.mlp for layer in job.shape.layers if layer.mlp and layer.mlp.experts), None)
    if moe is None or job.layout.ep == 1 or job.method == "full":
        return ""
    even = 1.5 * moe.experts * moe.width / moe.top_k
    if job.micro_batch_tokens > even:
        return (
            f"{job.micro_batch_tokens:,} tokens a rank exceed 1.5 × {moe.experts} × {moe.width} / {moe.top_k} = "
            f"{even:,.0f}: gathering the frozen experts would move fewer bytes than the all-to-all"
        )
    return ""


@ADVICE.rule(
    "zero2-replicates-frozen",
    title="ZeRO-2 replicates frozen weights",
    version="all versions",
    source="OpenTau PR 429: 72 GB against 12.5 GB",
)
def zero2_replicates_frozen(at: Setting) -> str:
    job = at.job
    if job.method != "full" and job.layout.sharding in ("zero1", "zero2") and job.layout.dp > 1 and job.layout.ep == 1:
        return (
            f"{job.layout.sharding} divides gradients and optimizer state only: every rank keeps all "
            f"{job.shape.parameters / 1e9:.1f} B frozen parameters. ZeRO-3 or FSDP divides them"
        )
    return ""


@ADVICE.rule(
    "stage-table",
    title="ZeRO stage by size",
    version="64 GiB devices",
    source="LUMI-G practice",
)
def stage_table(at: Setting) -> str:
    """Without EP on eight 64 GiB GCDs: dense to 13 B ZeRO-2, above ZeRO-3; sparse to 30 B ZeRO-2, above ZeRO-3."""
    job = at.job
    if job.layout.ep > 1 or job.method != "full" or at.cluster.gpu.memory_gib > 70 or at.cluster.gpus != 8:
        return ""
    limit = 31e9 if job.shape.is_moe else 14e9
    wanted = "zero2" if job.shape.parameters <= limit else "zero3"
    have = job.layout.sharding
    if have in ("zero2", "zero3") and have != wanted:
        kind = "sparse" if job.shape.is_moe else "dense"
        return (
            f"a {kind} model of {job.shape.parameters / 1e9:.0f} B on eight 64 GiB devices wants {wanted}, not {have}"
        )
    return ""
