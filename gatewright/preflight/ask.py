"""The planner, asked about a Job: its memory on the most loaded rank, and the rules of layout that it breaks."""

from dataclasses import replace

from gatewright.planner import job as planner
from gatewright.planner import targets
from gatewright.planner.catalogue import find_gpu
from gatewright.planner.legal import advice, refusals
from gatewright.planner.legal_rule import Backend, Setting
from gatewright.planner.memory import estimate_memory
from gatewright.planner.memory_states import optimizer_bytes, trainable
from gatewright.planner.policy import find_policy
from gatewright.planner.weights import FORMATS, native_format
from gatewright.preflight.job import Job
from gatewright.spec.errors import UserError
from gatewright.spec.hardware import Cluster, Gpu, Node
from gatewright.spec.shape import TensorRole

FRAMEWORKS = {
    "gatewright": "gatewright",
    "axolotl": "axolotl",
    "trl": "trl",
    "swift": "ms-swift",
    "swift-megatron": "megatron-swift",
    "megatron": "megatron",
    "llamafactory": "hf",
    "transformers": "hf",
}
"""Tool to the planner's policy of types and kernels."""
_ATTENTION_NAMES = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "attention", "linear_qkv", "linear_proj"}
)
_MLP_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "mlp", "linear_fc1", "linear_fc2"})
_NEEDS_GPU = frozenset({"tp-within-node", "ep-across-nodes", "ep-or-gather", "fp8-without-units", "stage-table"})
"""Rules that look at the GPU or the node, left out where neither is known."""


def ask_planner(job: Job) -> Job:
    """The job with the planner's answers; `unjudged` says what it would need to know."""
    if job.shape is None:
        said = f"{job.model.value} is neither a folder nor in the catalogue" if job.model.value else "no model is named"
        return replace(job, unjudged=f"memory and layout were not judged: {said}")
    if not job.trains:
        return job
    asked = planner_job(job)
    gpu = job.gpu or find_gpu("h200")
    setting = Setting(
        job=asked, cluster=cluster_of(job, gpu), backend=backend_of(job), micro_batches=micro_batches(job, asked)
    )
    known = _layout_known(job) and unknown_sharding(job) is None
    broken = [*refusals(setting), *advice(setting)] if known else []
    if job.gpu is None:
        broken = [refusal for refusal in broken if refusal.rule not in _NEEDS_GPU]
    job = replace(job, refusals=tuple(broken), checkpoint_bytes=checkpoint_bytes(job, asked))
    missing = what_memory_needs(job)
    if missing:
        return replace(job, unjudged=f"memory was not judged: {missing}")
    return replace(job, memory=estimate_memory(asked))


def checkpoint_bytes(job: Job, asked: planner.Job) -> int:
    """Weights that train, and unless only the model is saved, masters and moments; whole, however they are divided."""
    types = find_policy(asked.framework).trained(asked)
    state = 0.0 if job.save_only_model.value else optimizer_bytes(asked, types)
    return round(trainable(asked) * (types.weight + state))


def what_memory_needs(job: Job) -> str:
    if (unknown := unknown_sharding(job)) is not None:
        return unknown
    if job.gpu is None:
        return "no file names the GPU; give --gpu h200 or another of `gatewright gpus`"
    if job.world is None and (job.zero.get(0) > 0 or job.fsdp.value or job.ep.get(1) > 1):
        return "no file says how many GPUs; give --gpus"
    if job.max_tokens.value is None:
        return "no file limits the length of a document"
    return ""


def unknown_sharding(job: Job) -> str | None:
    """A config decides how the states are divided, and it was not found."""
    if job.backend.value == "deepspeed" and job.zero.value is None:
        return f"{job.backend.key} names a DeepSpeed config that is not here; give it as well"
    return None


def _layout_known(job: Job) -> bool:
    return job.world is not None or job.ep.given or job.tp.given or job.pp.given or job.cp.given


def cluster_of(job: Job, gpu: Gpu) -> Cluster:
    ranks = planner_ranks(job)
    per_node = min(ranks, job.gpus_per_node.value or job.launcher_processes.value or gpu.per_node)
    return Cluster(node=Node(gpu=gpu, gpus=per_node), nodes=-(-ranks // per_node))


def planner_ranks(job: Job) -> int:
    """Ranks said, or the fewest the layout takes."""
    tp, pp, cp, ep = job.tp.get(1), job.pp.get(1), job.cp.get(1), job.ep.get(1)
    return max(1, job.world or max(tp * pp * cp, ep))


def backend_of(job: Job) -> Backend:
    if job.uses("gatewright"):
        return "gatewright"
    if job.uses("megatron", "swift-megatron") or job.mca.value:
        return "megatron"
    if job.backend.value == "deepspeed" or job.zero.given:
        return "deepspeed-autoep" if job.auto_ep.value else "deepspeed"
    if job.fsdp.value:
        return "fsdp1" if job.fsdp_version.get(2) == 1 else "fsdp2"
    return "transformers"


def micro_batches(job: Job, asked: planner.Job) -> int | None:
    """Of one step on one pipeline; None where no file says it."""
    if job.global_batch.value is not None and job.micro_batch.value:
        return max(1, job.global_batch.value // (job.micro_batch.value * asked.layout.dp))
    return job.accumulation.value if job.accumulation.given else None


def sharding_of(job: Job) -> planner.Sharding:
    if job.uses("megatron", "swift-megatron") or job.mca.value:
        return "zero1"
    stages: dict[int, planner.Sharding] = {1: "zero1", 2: "zero2", 3: "fsdp2" if job.uses("gatewright") else "zero3"}
    if job.zero.value in stages:
        return stages[job.zero.get(0)]
    if job.fsdp.value:
        return "fsdp1" if job.fsdp_version.get(2) == 1 else "fsdp2"
    return "none"


def planner_job(job: Job) -> planner.Job:
    assert job.shape is not None
    framework = (
        "megatron" if job.mca.value else next((FRAMEWORKS[tool] for tool in FRAMEWORKS if tool in job.tools), "hf")
    )
    method: planner.Method = "qlora" if job.lora and job.bits.value == 4 else "lora" if job.lora else "full"
    offload: set[planner.Offload] = set()
    if job.offload_optimizer.value not in (None, "none"):
        offload.add("optimizer")
    if job.offload_params.value not in (None, "none"):
        offload.add("weights")
    return planner.Job(
        shape=job.shape,
        method=method,
        framework=framework,
        adapter=(own_adapter(job) or adapter_of(job)) if job.lora else None,
        frozen=frozenset({"router"}) if job.uses("gatewright") and not job.router_trains.value else frozenset(),
        storage=storage_of(job),
        expert_storage="bf16" if job.bits.value in (4, 8) and not job.quantize_experts.value else None,
        rows=job.micro_batch.get(1),
        tokens_per_row=job.max_tokens.get(4096),
        checkpointing="full" if job.checkpointing.get(False) else "none",
        attention="eager" if job.attention.value == "eager" else "flash",
        loss="linear" if job.liger.value else "full",
        optimizer="adamw_8bit" if "8bit" in job.optimizer.get("") else "adamw",
        accumulate=job.accumulation.get(1) > 1,
        layout=planner.Layout(
            ranks=planner_ranks(job),
            sharding=sharding_of(job),
            tp=job.tp.get(1),
            sequence_parallel=job.sequence_parallel.get(False),
            ep=job.ep.get(1),
            etp=job.etp.get(1),
            pp=job.pp.get(1),
            cp=job.cp.get(1),
        ),
        offload=frozenset(offload),
        reference_model=job.task.value == "dpo" and not job.lora,
        preference=job.task.value in ("dpo", "orpo", "simpo", "kto"),
    )


def storage_of(job: Job) -> planner.Storage:
    """How the frozen weights lie in memory; weights that train are the policy's business."""
    if job.bits.value in (4, 8):
        return "nf4" if job.bits.value == 4 else "int8"
    if not job.lora:
        return "bf16"
    return FORMATS[native_format(job.shape)].dense if job.shape else "bf16"


def own_adapter(job: Job) -> planner.Adapter | None:
    """The adapter of our own run file, read as the planner reads it; None for other tools, and for targets that the
    model does not have, on which the trainer stops."""
    if not job.uses("gatewright") or job.shape is None:
        return None
    router = ("router",) if job.router_trains.value and job.shape.is_moe else ()
    try:
        return targets.adapter_of(
            job.shape,
            rank=job.lora_rank.get(8),
            targets=job.lora_targets.get(()),
            full=tuple(dict.fromkeys((*job.lora_modules_to_save.get(()), *router))),
            expert_share=job.expert_share.get(1.0),
            dropout=job.lora_dropout.get(0) > 0,
        )
    except UserError:
        return None


def adapter_of(job: Job) -> planner.Adapter:
    """Roles and leaf names behind the targets of a tool."""
    names = frozenset(name.rpartition(".")[2] for name in job.lora_targets.get(()))
    everything = bool(names & {"all", "all-linear"}) or not names
    roles: set[TensorRole] = set()
    if everything or names & _ATTENTION_NAMES:
        roles |= {"attention", "linear_attention"}
    if everything or names & _MLP_NAMES:
        roles |= {"dense_mlp", "shared_experts"}
    peft = job.version("peft")
    fused = not job.uses("llamafactory") and (peft is None or peft >= (0, 19))
    by_name = fused and (everything or bool(names & _MLP_NAMES)) and not job.uses("gatewright")
    if job.lora_target_parameters.get(()) or "experts" in names or by_name:
        roles.add("routed_experts")
    return planner.Adapter(
        rank=job.lora_rank.get(8), roles=frozenset(roles), names=None, dropout=job.lora_dropout.get(0) > 0
    )
