"""GW921 to GW932: the GPUs and kernels of this machine as measured (probe.json), judged for the run."""

from gatewright.preflight.fault import Fault, Rule
from gatewright.preflight.job import Job, Written
from gatewright.spec.hardware import GIB
from gatewright.spec.probe import AttentionKernel, Device

EMPTY_SHARE = 0.95
"""Of a device's memory that is free before a job, at least: the driver keeps a little."""
SAME_SIZE = 0.03
PRODUCT_ERROR = 0.02
"""A bf16 product of 1,024 terms is off by 0.004 of its largest entry."""
ATTENTION_TIMES, ATTENTION_ERROR = 6.0, 0.03
"""A kernel may be off by so many times what the written-out computation is off in 16 bits, and by this in any case."""
FOUR_BIT_ERROR = 0.15


def _devices(job: Job) -> list[Device]:
    return (job.probe.devices or []) if job.probe else []


def said(job: Job, name: str, value: object) -> Written[object]:
    return Written(value, name, job.probe_file, 0)


def ended(job: Job, name: str, *statuses: str) -> str:
    """Text of a measurement that ended so; empty where it did not."""
    outcome = job.probe.outcome(name) if job.probe else None
    return outcome.text if outcome and outcome.status in statuses else ""


def local_ranks(job: Job) -> int:
    """Ranks of the run on one node."""
    per_node = job.gpus_per_node.value or job.launcher_processes.value
    return per_node or job.world or len(_devices(job)) or 1


def gpu_has_too_little_free(job: Job) -> Fault | None:
    """The plan needs more than the fullest device has free now: the run ends in an out-of-memory error whatever its
    config says."""
    devices = _devices(job)
    if not devices or job.memory is None:
        return None
    least = min(devices, key=lambda device: device.free_bytes)
    need, free = job.memory.device.bytes, least.free_bytes
    if need <= free:
        return None
    return Fault(
        f"the plan needs {need / GIB:.1f} GiB at the {job.memory.peak.name}, {(need - free) / GIB:.1f} more than "
        f"GPU {least.index} ({least.name}) has free: {free / GIB:.1f} of {least.total_bytes / GIB:.1f}",
        (job.micro_batch, job.max_tokens, said(job, "free_bytes", least.free_bytes)),
        "free the device, or plan for what it has: gatewright plan",
    )


def gpu_is_not_empty(job: Job) -> Fault | None:
    """Memory is taken before the run starts: a process of an earlier job, or somebody else's. It is missing at the
    peak, hours later."""
    taken = [device for device in _devices(job) if device.free_bytes < EMPTY_SHARE * device.total_bytes]
    if not taken:
        return None
    worst = min(taken, key=lambda device: device.free_bytes)
    held = worst.total_bytes - worst.free_bytes
    return Fault(
        f"{len(taken)} of {len(_devices(job))} GPUs are not empty: GPU {worst.index} has {held / GIB:.1f} GiB taken",
        (said(job, "free_bytes", worst.free_bytes),),
        "find the process (nvidia-smi, rocm-smi), or ask for another node",
    )


def fewer_gpus_than_the_run(job: Job) -> Fault | None:
    """The run starts more ranks on a node than torch sees devices: two ranks would share one, or the start fails."""
    wanted = job.gpus_per_node if job.gpus_per_node.value else job.launcher_processes
    if job.probe is None or not wanted.value:
        return None
    seen = len(_devices(job))
    if seen >= wanted.value or (not seen and not ended(job, "devices", "absent")):
        return None
    return Fault(
        f"{wanted}, and torch sees {seen} GPUs on {job.probe.host}",
        (wanted, said(job, "devices", seen)),
        "probe a compute node with the job's own GPUs, or change the number",
    )


def another_gpu_than_planned(job: Job) -> Fault | None:
    """Bytes and rates were planned for another GPU than the one that is here."""
    if job.gpu is None or not _devices(job):
        return None
    device = _devices(job)[0]
    if abs(device.total_bytes / job.gpu.memory_bytes - 1) <= SAME_SIZE:
        return None
    return Fault(
        f"the run is for {job.gpu.name} with {job.gpu.memory_bytes / GIB:.1f} GiB, and this is {device.name} with "
        f"{device.total_bytes / GIB:.1f}",
        (said(job, "total_bytes", device.total_bytes),),
        "name the GPU that is here (`gatewright gpus`)",
    )


def no_code_for_this_gpu(job: Job) -> Fault | None:
    """This build of torch holds no code for the device: the first kernel raises `invalid device function` or `no kernel
    image`."""
    lacking = [device for device in _devices(job) if not device.in_build]
    if not lacking:
        return None
    versions = job.probe.versions if job.probe else None
    held = f" (it has {', '.join(versions.architectures)})" if versions else ""
    return Fault(
        f"torch has no code for {lacking[0].architecture}, GPU {lacking[0].index} ({lacking[0].name}){held}",
        (said(job, "architecture", lacking[0].architecture),),
        "install a build of torch for this architecture",
    )


def gpu_computes_wrong(job: Job) -> Fault | None:
    """A matrix product on the device fails, or is not the CPU's."""
    for device in _devices(job):
        error = device.product_error
        if not device.problem and (error is None or error <= PRODUCT_ERROR):
            continue
        what = device.problem or f"its product is off by {error:.2g} of the largest entry"
        return Fault(
            f"GPU {device.index} ({device.name}) does not compute: {what}",
            (said(job, "product_error", error),),
            "leave this node out, and report it",
        )
    if text := ended(job, "devices", "failed"):
        return Fault(f"the GPUs cannot be used: {text}", (said(job, "devices", text),), "leave this node out")
    return None


def gpu_is_held_back(job: Job) -> Fault | None:
    """Heat or a power brake holds the clock down, or memory errors could not be corrected: one slow or wrong device is
    every rank's pace and result."""
    for state in (job.probe.states or []) if job.probe else []:
        if not state.throttled and not state.uncorrected_errors:
            continue
        errors = f"{state.uncorrected_errors} uncorrected memory errors" if state.uncorrected_errors else ""
        clock = (
            f"clock at {state.clock_mhz:.0f} MHz for {state.throttled}" if state.throttled and state.clock_mhz else ""
        )
        what = ", ".join(filter(None, (clock or state.throttled, errors)))
        return Fault(
            f"GPU {state.index}: {what}",
            (said(job, "driver", state.driver),),
            "leave this node out, and report it",
        )
    return None


def _chosen(job: Job) -> AttentionKernel | None:
    kernels = (job.probe.attention or []) if job.probe else []
    return next((kernel for kernel in kernels if kernel.chosen), None)


def attention_kernel_is_wrong(job: Job) -> Fault | None:
    """The kernel that would run raises, gives NaN, or is further off the float32 computation than 16 bits explain:
    seen on MI300X, gfx942 and gfx1151 with some versions."""
    kernel = _chosen(job)
    if text := ended(job, "attention", "failed", "hung"):
        return Fault(f"attention could not be measured: {text}", (said(job, "attention", text),), "use another kernel")
    if kernel is None:
        return None
    allowed = max(ATTENTION_TIMES * kernel.plain_error, ATTENTION_ERROR)
    worst = max(kernel.output_error or 0.0, kernel.gradient_error or 0.0)
    if not kernel.problem and worst <= allowed:
        return None
    what = kernel.problem or f"off by {worst:.2g}, and the written-out computation by {kernel.plain_error:.2g}"
    return Fault(
        f"{kernel.kernel} at head size {kernel.qk_dim} on {kernel.device}: {what}",
        (job.attention, said(job, "attention", kernel.kernel)),
        "install another version of the kernel, or use another kernel",
    )


def attention_kernel_is_missing(job: Job) -> Fault | None:
    """The kernel that the run asks for is not installed here, or no kernel for packed documents is: what answers
    instead is slower, and may see across documents."""
    if job.probe is None or job.probe.versions is None or not _devices(job):
        return None
    if "flash" in job.attention.get("") and "flash-attn" not in job.probe.versions.packages:
        return Fault(
            f"{job.attention}, and flash-attn is not installed",
            (job.attention, said(job, "packages", "without flash-attn")),
            "install flash-attn built for this torch, or ask for another kernel",
        )
    kernel = _chosen(job)
    if kernel is None or not job.uses("gatewright") or kernel.kernel != "sdpa per document":
        return None
    return Fault(
        f"no kernel for packed documents runs here: {kernel.kernel} takes them one by one",
        (said(job, "attention", kernel.kernel),),
        "install flash-attn, or a torch whose varlen_attn knows this GPU",
    )


def expandable_segments_are_off(job: Job) -> Fault | None:
    """The variable asks for expandable segments and the allocator's own snapshot has none: the build does not know
    them, the variable came too late, or its spelling is off. Fragmentation then costs what it would have saved."""
    allocator = job.probe.allocator if job.probe else None
    if allocator is None or allocator.expandable or "expandable_segments" not in allocator.asked:
        return None
    if "false" in allocator.asked.lower():
        return None
    return Fault(
        f"{allocator.variable}={allocator.asked}, and the allocator's segments are not expandable",
        (said(job, allocator.variable, allocator.asked),),
        "set it in the launcher as expandable_segments:True, or plan without it",
    )


def four_bit_is_broken(job: Job) -> Fault | None:
    """The run stores its base in 4 bits, and the round trip does not work here (bitsandbytes missing, built for another
    ROCm or CUDA, or wrong)."""
    if job.probe is None or job.bits.value != 4:
        return None
    if text := ended(job, "four_bit", "failed", "hung", "absent"):
        return Fault(
            f"{job.bits}: {text}", (job.bits, said(job, "four_bit", text)), "install bitsandbytes for this GPU"
        )
    measured = job.probe.four_bit
    if measured is None or measured.error <= FOUR_BIT_ERROR:
        return None
    return Fault(
        f"{job.bits}: the round trip is off by {measured.error:.2f} of the weights, 0.09 is NF4's own",
        (job.bits, said(job, "error", measured.error)),
        "install bitsandbytes for this GPU",
    )


def process_group_fails(job: Job) -> Fault | None:
    """Two process groups, the least that FSDP or expert parallelism has, do not both work on this node."""
    text = ended(job, "groups", "failed", "hung")
    if not text or local_ranks(job) == 1:
        return None
    return Fault(
        f"process groups do not work here: {text}",
        (said(job, "groups", text),),
        "pass device_id to init_process_group, and look at NCCL_DEBUG=INFO for the transport",
    )


_PROBE = "gatewright probe"
RULES = (
    Rule("GW921", "error", gpu_has_too_little_free, f"{_PROBE}; Gatewright's planner"),
    Rule("GW922", "warning", gpu_is_not_empty, "returnn#1649; lightning#4442"),
    Rule("GW923", "error", fewer_gpus_than_the_run, _PROBE),
    Rule("GW924", "warning", another_gpu_than_planned, _PROBE),
    Rule("GW925", "error", no_code_for_this_gpu, "`invalid device function` on MI250X"),
    Rule("GW926", "error", gpu_computes_wrong, _PROBE),
    Rule("GW927", "warning", gpu_is_held_back, "NVML's clock event reasons"),
    Rule("GW928", "error", attention_kernel_is_wrong, "ROCm/flash-attention#143; pytorch/pytorch#138764"),
    Rule("GW929", "warning", attention_kernel_is_missing, "lumi-ai-factory/laifs-container-recipes#33"),
    Rule("GW930", "warning", expandable_segments_are_off, "pytorch/pytorch#122057; axolotl-ai-cloud/axolotl#2183"),
    Rule("GW931", "error", four_bit_is_broken, "bitsandbytes on ROCm: wrong library by version arithmetic"),
    Rule("GW932", "error", process_group_fails, "lumi-ai-factory/laifs-container-recipes#44"),
)
