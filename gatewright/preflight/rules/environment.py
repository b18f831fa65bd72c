"""GW75x to GW78x: environment variables, kernels of this platform, caches and quotas."""

import re

from gatewright.preflight.fault import Fault, Rule, drop, set_to
from gatewright.preflight.job import Job, Word, Written

_ALLOC = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_HOME = re.compile(r"(\$\{?HOME\}?|~|/home/|/users/)")
_SHARED = re.compile(
    r"(\$\{?(SCRATCH|WORK|PROJECT|FLASH)\w*\}?|/(scratch|project|flash|work|lustre|pfs|users|home)\b|~|\$\{?HOME)"
)


def _env(job: Job, name: str) -> Word:
    return job.env.get(name, Written())


def _in_job(job: Job) -> bool:
    """The environment is known: a script was read, so what it does not set is not set by it."""
    return job.slurm.value is True and job.trains


def _many_nodes(job: Job) -> bool:
    return job.nodes.get(1) > 1


def alloc_conf_syntax(job: Job) -> Fault | None:
    """The allocator reads `key:value`. With `=` it reads nothing and says nothing, or fails at the first allocation."""
    wrong = next((said for name in _ALLOC if "=" in (said := _env(job, name)).get("")), None)
    if wrong is None:
        return None
    return Fault(
        f"{wrong}: the allocator wants ':' between key and value",
        (wrong,),
        f"write {wrong.get('').replace('=', ':')}",
        set_to(wrong, wrong.get("").replace("=", ":")),
    )


def expandable_segments_on_rocm(job: Job) -> Fault | None:
    """ROCm builds before torch 2.11 with ROCm 7 print a warning on each rank and ignore the setting; memory planned on
    its effect is not there."""
    said = next((said for name in _ALLOC if "expandable_segments:T" in (said := _env(job, name)).get("")), None)
    if said is None or not job.amd:
        return None
    torch, rocm = job.version("torch"), job.version("rocm")
    if torch is not None and torch >= (2, 11) and (rocm is None or rocm >= (7, 0)):
        return None
    return Fault(
        f"{said.key} asks for expandable segments, which ROCm builds before torch 2.11 ignore",
        (said,),
        "read the allocator's snapshot (is_expandable) before you count on it; plan for fragmentation",
    )


def alloc_conf_that_rocm_does_not_read(job: Job) -> Fault | None:
    """ROCm builds of torch before 2.9 read PYTORCH_HIP_ALLOC_CONF alone; newer ones PYTORCH_ALLOC_CONF."""
    said = _env(job, "PYTORCH_CUDA_ALLOC_CONF")
    if not job.amd or said.value is None or _env(job, "PYTORCH_HIP_ALLOC_CONF").value or _env(job, _ALLOC[0]).value:
        return None
    return Fault(
        f"only {said.key} is set, which a ROCm build may not read",
        (said,),
        "set PYTORCH_HIP_ALLOC_CONF and PYTORCH_ALLOC_CONF to the same value",
    )


def devices_filtered_twice(job: Job) -> Fault | None:
    """HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES left: with both, ranks see no GPU or the same one."""
    first, second = _env(job, "ROCR_VISIBLE_DEVICES"), _env(job, "HIP_VISIBLE_DEVICES")
    if first.value is None or second.value is None:
        return None
    return Fault(
        f"{first} and {second}: the second counts within the first",
        (second, first),
        "set one of them",
        drop(second),
    )


def collectives_over_one_network_card(job: Job) -> Fault | None:
    """A LUMI-G node has four network cards, hsn0 to hsn3; RCCL uses those it is told of, and guesses wrong without."""
    said = _env(job, "NCCL_SOCKET_IFNAME")
    if not (job.lumi and _many_nodes(job) and _in_job(job)):
        return None
    if said.value is not None and (said.value.count("hsn") == 4 or said.value == "hsn"):
        return None
    text = str(said) if said.given else "NCCL_SOCKET_IFNAME is not set"
    return Fault(
        f"{text} on {job.nodes.value} nodes of LUMI-G",
        (said if said.given else job.partition,),
        "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3",
        set_to(said, "hsn0,hsn1,hsn2,hsn3"),
    )


def gpu_direct_not_set(job: Job) -> Fault | None:
    """Without NCCL_NET_GDR_LEVEL=3 (PHB) RCCL on LUMI-G copies through the host's memory."""
    if not (job.lumi and _many_nodes(job) and _in_job(job)) or _env(job, "NCCL_NET_GDR_LEVEL").value in ("3", "PHB"):
        return None
    return Fault(
        f"NCCL_NET_GDR_LEVEL is not 3 on {job.nodes.value} nodes of LUMI-G",
        (job.partition,),
        "export NCCL_NET_GDR_LEVEL=3",
    )


def communicators_that_hang(job: Job) -> Fault | None:
    """On LUMI-G the second communicator hung in 13 of 17 starts on four nodes, without a time-out; the guide now sets
    the memory-registration monitor to userfaultfd."""
    if not (job.lumi and _many_nodes(job) and _in_job(job)) or _env(job, "FI_MR_CACHE_MONITOR").value == "userfaultfd":
        return None
    return Fault(
        f"FI_MR_CACHE_MONITOR is not userfaultfd on {job.nodes.value} nodes of LUMI-G",
        (job.partition,),
        "export FI_MR_CACHE_MONITOR=userfaultfd",
    )


def miopen_cache_on_a_shared_disk(job: Job) -> Fault | None:
    """MIOpen keeps its tuning in SQLite files. Many ranks on one network file system lock or damage them."""
    said = _env(job, "MIOPEN_USER_DB_PATH")
    if not (job.amd and _in_job(job)) or (said.value is not None and not _SHARED.search(said.value)):
        return None
    text = str(said) if said.given else "MIOPEN_USER_DB_PATH is not set"
    return Fault(
        f"{text}: all ranks share one SQLite file",
        (said if said.given else job.slurm,),
        "export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen-$SLURM_JOB_ID and the same in MIOPEN_CUSTOM_CACHE_DIR",
    )


def miopen_variable_that_is_not_read(job: Job) -> Fault | None:
    """MIOPEN_USER_DB stands in guides, but MIOpen reads MIOPEN_USER_DB_PATH."""
    said = _env(job, "MIOPEN_USER_DB")
    if said.value is None:
        return None
    return Fault(f"{said}: MIOpen does not read it", (said,), "export MIOPEN_USER_DB_PATH instead")


def scratch_reclaim_on_mi300x(job: Job) -> Fault | None:
    """AMD sets HSA_NO_SCRATCH_RECLAIM=1 as a must for mixtures of experts on MI300X."""
    if not job.moe or not _in_job(job) or job.gpu is None or job.gpu.architecture not in ("gfx942", "gfx950"):
        return None
    if _env(job, "HSA_NO_SCRATCH_RECLAIM").value == "1":
        return None
    return Fault(
        f"HSA_NO_SCRATCH_RECLAIM is not 1 for a mixture of experts on {job.card}",
        (job.slurm, job.model),
        "export HSA_NO_SCRATCH_RECLAIM=1",
    )


def one_hardware_queue(job: Job) -> Fault | None:
    """Megatron orders communication before computation by launching on one hardware queue; with tensor parallelism it
    asks for CUDA_DEVICE_MAX_CONNECTIONS=1."""
    if not job.uses("megatron", "swift-megatron") or not job.tp.get(1) > 1 or not _in_job(job):
        return None
    if _env(job, "CUDA_DEVICE_MAX_CONNECTIONS").value == "1":
        return None
    return Fault(
        f"CUDA_DEVICE_MAX_CONNECTIONS is not 1 with {job.tp}",
        (job.tp,),
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    )


def flash_attention_three_on_amd(job: Job) -> Fault | None:
    """FlashAttention 3 is written for Hopper GPUs and has no ROCm build."""
    if not job.amd or job.attention.value != "flash3":
        return None
    return Fault(
        f"{job.attention.key} names FlashAttention 3, which has no ROCm build",
        (job.attention,),
        "use flash_attention_2, and run it forward and backward at the model's head size first",
        set_to(job.attention, "flash_attention_2"),
    )


def flash_attention_backend_on_rocm(job: Job) -> Fault | None:
    """On ROCm the same package holds two kernels, and an environment variable picks one when it is built and again when
    it runs; with the wrong one the import fails, or attention falls back and memory does not fit."""
    if not job.amd or job.attention.value != "flash" or not _in_job(job) or job.uses("gatewright"):
        return None
    if _env(job, "FLASH_ATTENTION_TRITON_AMD_ENABLE").value is not None:
        return None
    return Fault(
        f"{job.attention} on AMD: FLASH_ATTENTION_TRITON_AMD_ENABLE is not set",
        (job.attention,),
        "set it to TRUE for the Triton kernel or FALSE for CK, and run the kernel once before the queue",
    )


def bitsandbytes_on_rocm(job: Job) -> Fault | None:
    """bitsandbytes looks for a library named after the ROCm version, reads 7.14 as 8.4, and falls back to its CPU
    library without stopping."""
    if not job.amd or not (job.bits.value in (4, 8) or "8bit" in job.optimizer.get("")):
        return None
    said = job.bits if job.bits.value else job.optimizer
    return Fault(
        f"{said.key} needs bitsandbytes on {job.card}, whose ROCm build must match torch's",
        (said,),
        "quantise and multiply one matrix on the GPU before the queue; else train in bf16 with ZeRO-3 or FSDP2",
    )


def flash_attention_that_te_refuses(job: Job) -> Fault | None:
    """Transformer Engine refuses flash-attn 2.8.4 and falls back to unfused attention without stopping: out of memory
    follows."""
    if job.version("flash-attn") != (2, 8, 4) or not job.uses("megatron", "swift-megatron"):
        return None
    said = job.versions["flash-attn"]
    return Fault(
        f"{said} with Megatron: Transformer Engine falls back to unfused attention",
        (said,),
        "use 2.8.0 to 2.8.3",
        set_to(said, "2.8.3"),
    )


def hub_cache_in_home(job: Job) -> Fault | None:
    """Models go to ~/.cache unless HF_HOME says otherwise. Home quotas are small (LUMI: 20 GB and 100,000 files), and
    the download ends in `Disk quota exceeded`."""
    said = _env(job, "HF_HOME")
    if job.uses("gatewright"):  # it fetches nothing
        return None
    if not _in_job(job) or (said.value is not None and not _HOME.search(said.value)):
        return None
    if job.model.value is None or (job.model.value.startswith((".", "/")) and said.value is None):
        return None
    size = 2 * job.shape.parameters if job.shape else 0
    weight = f"{size / 1e9:.0f} GB of {job.model.value}" if size else f"{job.model.value}"
    return Fault(
        f"{said if said.given else 'HF_HOME is not set'}: {weight} go to the home folder",
        (said if said.given else job.slurm,),
        "export HF_HOME to scratch or flash",
    )


def jit_cache_on_a_shared_disk(job: Job) -> Fault | None:
    """Triton and Inductor write compiled kernels into a cache. On one network file system 128 ranks damaged it, and it
    was 1.5 times slower than a local disk."""
    said = _env(job, "TRITON_CACHE_DIR")
    if not (_in_job(job) and _many_nodes(job)) or (said.value is not None and not _SHARED.search(said.value)):
        return None
    return Fault(
        f"{said if said.given else 'TRITON_CACHE_DIR is not set'}: {job.nodes.value} nodes share one cache of kernels",
        (said if said.given else job.nodes,),
        "export TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to a folder in /tmp",
    )


def output_in_home(job: Job) -> Fault | None:
    """A home folder holds tens of gigabytes; a few checkpoints fill it, and the save that fails is the one needed."""
    if not job.slurm.value or not _HOME.match(job.output_dir.get("")):
        return None
    return Fault(
        f"{job.output_dir}: checkpoints go to the home folder" + (" (20 GB on LUMI)" if job.lumi else ""),
        (job.output_dir,),
        "write to scratch",
    )


def checkpoints_fill_the_disk(job: Job) -> Fault | None:
    """Every checkpoint of full fine-tuning holds weights and two moments. Without a limit they all stay."""
    if job.save_limit.value is not None or job.shape is None or not job.full or job.uses("gatewright"):
        return None
    every, steps = job.save_steps.get(0), job.max_steps.get(0)
    saves = steps // every if every > 0 and steps > 0 and job.save_strategy.get("steps") == "steps" else 0
    each = job.shape.parameters * (2 if job.save_only_model.value else 10)
    if saves < 3 or saves * each < 5e11:
        return None
    return Fault(
        f"{saves} checkpoints of {each / 1e9:.0f} GB ({job.save_steps}, {job.max_steps}): {saves * each / 1e12:.1f} TB",
        (job.save_steps, job.max_steps),
        "add save_total_limit: 2",
    )


_LUMI = "LUMI AI guide and LUMI-G documentation, September 2026"
RULES = (
    Rule("GW751", "error", alloc_conf_syntax, "LangPTune#3", safe=True),
    Rule("GW752", "note", expandable_segments_on_rocm, "pytorch#173330, #177974 and #179930; LUMI containers"),
    Rule("GW753", "warning", alloc_conf_that_rocm_does_not_read, "PyTorch docs, allocator variables by version"),
    Rule("GW754", "error", devices_filtered_twice, "ROCm docs, GPU isolation", safe=True),
    Rule("GW755", "warning", collectives_over_one_network_card, _LUMI, safe=True),
    Rule("GW756", "warning", gpu_direct_not_set, _LUMI),
    Rule(
        "GW757", "warning", communicators_that_hang, "lumi-ai-factory/laifs-container-recipes#28 and #44; guide PR 118"
    ),
    Rule("GW758", "warning", miopen_cache_on_a_shared_disk, "ROCm/MIOpen#2214 and #1878; tensorflow-upstream#1419"),
    Rule("GW759", "warning", miopen_variable_that_is_not_read, "MIOpen docs: MIOPEN_USER_DB_PATH"),
    Rule("GW760", "warning", scratch_reclaim_on_mi300x, "AMD-AGI/Primus, environment of MI300X runs"),
    Rule("GW761", "note", one_hardware_queue, "Megatron-LM; AMD-AGI/Primus"),
    Rule("GW762", "error", flash_attention_three_on_amd, "flash-attention README: FlashAttention 3 is for Hopper"),
    Rule("GW763", "note", flash_attention_backend_on_rocm, "Dao-AILab/flash-attention#1499"),
    Rule("GW764", "warning", bitsandbytes_on_rocm, "ROCm/bitsandbytes#82, #35; bitsandbytes#2014"),
    Rule("GW765", "error", flash_attention_that_te_refuses, "lumi-ai-factory/laifs-container-recipes#33"),
    Rule("GW781", "warning", hub_cache_in_home, "ayaanzhaque/instruct-nerf2nerf#86; MEDS-DEV#266"),
    Rule("GW782", "warning", jit_cache_on_a_shared_disk, "LUMI container validation at 128 ranks"),
    Rule("GW783", "warning", output_in_home, "open-mmlab/mmdetection#12069"),
    Rule("GW784", "warning", checkpoints_fill_the_disk, "databrickslabs/dolly#139"),
)
