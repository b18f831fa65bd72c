"""Rules that a setting must not break: it fails, or its result is wasted."""

from gatewright.planner.legal_rule import Rules, Setting, divisors
from gatewright.spec.hardware import GIB

SMALL_STORAGE = ("fp8", "mxfp8", "int8", "mxfp4", "nvfp4", "nf4", "nf4_double", "int4")
ERRORS = Rules()


@ERRORS.rule(
    "ranks-divide",
    title="group sizes divide the ranks",
    version="all versions",
    source="arithmetic",
)
def ranks_divide(at: Setting) -> str:
    layout = at.job.layout
    product = layout.tp * layout.pp * layout.cp
    if layout.ranks % product:
        return (
            f"tp {layout.tp} × pp {layout.pp} × cp {layout.cp} = {product} does not divide {layout.ranks} ranks; "
            f"their product must be one of {divisors(layout.ranks)}"
        )
    return ""


@ERRORS.rule(
    "ep-needs-experts",
    title="EP needs experts",
    version="all versions",
    source="definition",
)
def ep_needs_experts(at: Setting) -> str:
    if at.job.layout.ep > 1 and not at.job.shape.is_moe:
        return f"ep {at.job.layout.ep}, but {at.job.shape.name} is dense and has no experts to divide; use ep 1"
    return ""


@ERRORS.rule(
    "ep-divides-experts",
    title="EP divides the experts",
    version="all versions",
    source="axolotl 0.19, transformers 5.24, Megatron-Core 0.16 assert it",
)
def ep_divides_experts(at: Setting) -> str:
    experts, ep = at.job.shape.experts, at.job.layout.ep
    if experts and experts % ep:
        return f"ep {ep} does not divide {experts} experts: a rank owns whole experts; use one of {divisors(experts)}"
    return ""


@ERRORS.rule(
    "ep-divides-ranks",
    title="EP divides a stage's ranks",
    version="all versions",
    source="Megatron-Core parallel_state",
)
def ep_divides_ranks(at: Setting) -> str:
    layout = at.job.layout
    room = layout.dp * layout.cp * layout.tp // layout.etp
    if layout.ep > 1 and room % layout.ep:
        return f"ep {layout.ep} × etp {layout.etp} does not divide the {room * layout.etp} ranks of a pipeline stage"
    return ""


@ERRORS.rule(
    "zero3-with-native-moe",
    title="ZeRO-3 with DeepSpeed's MoE layer",
    version="DeepSpeed up to 0.19",
    source="deepspeed.moe asserts; issues 1392, 2870",
    backends=("deepspeed",),
)
def zero3_with_native_moe(at: Setting) -> str:
    layout = at.job.layout
    if layout.ep > 1 and layout.sharding == "zero3":
        return (
            f"ZeRO-3 divides every parameter over the data-parallel ranks, expert parallelism (ep {layout.ep}) gives "
            "each rank whole experts: DeepSpeed's own MoE layer asserts. Use ZeRO-2 with EP, or AutoEP"
        )
    return ""


@ERRORS.rule(
    "zero3-with-autoep",
    title="ZeRO-3 with AutoEP, constrained",
    version="DeepSpeed 0.19.6",
    source="DeepSpeed PR 8060; docs autoep.rst",
    backends=("deepspeed-autoep",),
)
def zero3_with_autoep(at: Setting) -> str:
    layout = at.job.layout
    if layout.ep > 1 and layout.sharding == "zero3" and (layout.tp > 1 or layout.etp > 1 or layout.cp > 1):
        return (
            f"AutoEP with ZeRO-3 takes no tensor or sequence parallelism (tp {layout.tp}, etp {layout.etp}, "
            f"cp {layout.cp}); set them to 1, or use ZeRO-2"
        )
    return ""


@ERRORS.rule(
    "fsdp1-with-ep",
    title="EP with FSDP1",
    version="torch 2.x",
    source="FlatParameter holds a whole block",
    backends=("transformers", "fsdp1"),
)
def fsdp1_with_ep(at: Setting) -> str:
    if at.job.layout.ep > 1 and at.job.layout.sharding == "fsdp1":
        return (
            f"FSDP1 flattens whole blocks, so experts of ep {at.job.layout.ep} cannot have their own mesh; "
            "use FSDP2 with a separate expert mesh, or ZeRO-2"
        )
    return ""


@ERRORS.rule(
    "heads-divide",
    title="TP divides the attention heads",
    version="all versions",
    source="every TP implementation asserts it",
)
def heads_divide(at: Setting) -> str:
    tp = at.job.layout.tp
    for layer in at.job.shape.layers:
        attention = layer.attention
        if attention is not None and attention.heads % tp:
            return f"tp {tp} does not divide {attention.heads} attention heads; use one of {divisors(attention.heads)}"
    return ""


@ERRORS.rule(
    "tp-within-node",
    title="TP stays within a node",
    version="all versions",
    source="four all-reduces a layer",
)
def tp_within_node(at: Setting) -> str:
    layout, per_node = at.job.layout, at.cluster.node.gpus
    if layout.tp * layout.etp > per_node:
        return (
            f"tp {layout.tp} × etp {layout.etp} spans more than one node of {per_node} GPUs; every layer would wait "
            f"for {at.cluster.gpu.network}; keep tp within a node"
        )
    return ""


@ERRORS.rule(
    "etp-only-for-large-experts",
    title="TP inside an expert only where one is too large",
    version="all versions",
    source="MISSION: EP",
)
def etp_only_for_large_experts(at: Setting) -> str:
    shape, layout = at.job.shape, at.job.layout
    if layout.etp == 1 or not shape.is_moe:
        return ""
    largest = max(group.parameters / group.experts for group in shape.groups if group.role == "routed_experts")
    states = largest * (18 if at.job.method == "full" else 2)
    if states < at.cluster.gpu.memory_bytes / 4:
        return (
            f"etp {layout.etp} splits an expert whose states take {states / GIB:.2f} GiB, which is far below the "
            f"GPU's {at.cluster.gpu.memory_gib:.0f} GiB; whole experts (etp 1, more ep) need fewer messages"
        )
    return ""


@ERRORS.rule(
    "pp-within-layers",
    title="stages do not exceed layers",
    version="all versions",
    source="definition",
)
def pp_within_layers(at: Setting) -> str:
    layers, stages = len(at.job.shape.layers), at.job.layout.pp * at.job.layout.virtual_stages
    if stages > layers:
        return f"{stages} pipeline stages for {layers} layers; use at most {layers}"
    return ""


@ERRORS.rule(
    "dp-needs-micro-batches",
    title="a micro-batch for every data-parallel rank",
    version="all versions",
    source="arithmetic",
)
def dp_needs_micro_batches(at: Setting) -> str:
    if at.micro_batches is not None and at.micro_batches < 1:
        job = at.job
        micro_batch = job.micro_batch_tokens * job.layout.cp
        least = job.layout.dp * micro_batch
        return (
            f"{job.layout.dp} data-parallel ranks, each with a micro-batch of {micro_batch:,} tokens, need at "
            f"least {least:,} tokens a step; raise tokens_per_step, use fewer GPUs, or divide rows with cp"
        )
    return ""


@ERRORS.rule(
    "pp-needs-micro-batches",
    title="enough micro-batches for the pipeline",
    version="all versions",
    source="1F1B schedule",
)
def pp_needs_micro_batches(at: Setting) -> str:
    if at.micro_batches is not None and 1 < at.job.layout.pp > at.micro_batches:
        return (
            f"{at.micro_batches} micro-batches a step cannot fill pp {at.job.layout.pp}; raise tokens_per_step or "
            "lower pp"
        )
    return ""


@ERRORS.rule(
    "pp-with-zero23",
    title="pipeline with ZeRO-2 or ZeRO-3",
    version="DeepSpeed up to 0.19",
    source="PipelineEngine assertion",
    backends=("deepspeed", "deepspeed-autoep"),
)
def pp_with_zero23(at: Setting) -> str:
    if at.job.layout.pp > 1 and at.job.layout.sharding in ("zero2", "zero3"):
        return (
            f"pp {at.job.layout.pp} with {at.job.layout.sharding}: gradients would be reduced and partitioned at every "
            "micro-batch; DeepSpeed's pipeline engine refuses stages 2 and 3. Use ZeRO-1"
        )
    return ""


@ERRORS.rule(
    "pp-unsupported",
    title="no pipeline here",
    version="Gatewright 0, transformers 5.24",
    source="transformers refuses EP × PP and FSDP × PP",
    backends=("gatewright", "transformers"),
)
def pp_unsupported(at: Setting) -> str:
    if at.job.layout.pp > 1:
        return f"pp {at.job.layout.pp}: this backend has no pipeline; use ep, zero2 or fsdp2 to divide the model"
    return ""


@ERRORS.rule(
    "tp-unsupported",
    title="no tensor parallelism here",
    version="Gatewright 0",
    source="parallel section of the run file",
    backends=("gatewright",),
)
def tp_unsupported(at: Setting) -> str:
    if at.job.layout.tp > 1:
        return f"tp {at.job.layout.tp}: this backend has no tensor parallelism; use ep, zero2 or fsdp2"
    return ""


@ERRORS.rule(
    "cp-divides-tokens",
    title="CP leaves enough tokens",
    version="all versions",
    source="zigzag ring attention",
    backends=("transformers", "deepspeed", "deepspeed-autoep", "fsdp1", "fsdp2", "megatron"),
)
def cp_divides_tokens(at: Setting) -> str:
    job = at.job
    if job.layout.cp > 1 and job.tokens_per_row < 2 * 128 * job.layout.cp:
        return (
            f"cp {job.layout.cp} leaves {job.row_tokens} tokens a rank; two zigzag chunks of at least 128 need "
            f"{2 * 128 * job.layout.cp} tokens a row"
        )
    return ""


@ERRORS.rule(
    "cp-with-eager",
    title="CP needs a fused kernel",
    version="all versions",
    source="ring attention, TE, Ulysses",
)
def cp_with_eager(at: Setting) -> str:
    if at.job.layout.cp > 1 and at.job.attention == "eager":
        return "context parallelism exchanges keys inside a fused kernel; eager attention has none. Use flash or sdpa"
    return ""


@ERRORS.rule(
    "full-needs-wide-weights",
    title="full fine-tuning of quantised weights",
    version="all versions",
    source="definition",
)
def full_needs_wide_weights(at: Setting) -> str:
    if at.job.method == "full" and at.job.storage in SMALL_STORAGE:
        return f"full fine-tuning of weights stored in {at.job.storage}: rounded weights take no small steps; use bf16"
    return ""


@ERRORS.rule(
    "eight-bit-with-dtensor",
    title="8-bit optimizer with FSDP2",
    version="bitsandbytes up to 0.50",
    source="axolotl 0.19 check_fsdp2_w_8bit_optimizer; ours gives it a rank's own part (train/eight_bit.py)",
    backends=("transformers", "deepspeed", "deepspeed-autoep", "fsdp1", "fsdp2", "megatron"),
)
def eight_bit_with_dtensor(at: Setting) -> str:
    if at.job.optimizer in ("adamw_8bit", "adamw_4bit") and at.job.layout.sharding == "fsdp2":
        return (
            f"bitsandbytes' {at.job.optimizer} does not take the DTensors of FSDP2; use adamw, or torchao's optimizer"
        )
    return ""
