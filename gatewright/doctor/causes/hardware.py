"""Hardware and driver: faults of a GPU, kernels that are not built for it, assertions inside a kernel."""

from gatewright.doctor.cause import Cause, Log, Role, Seen, env, plain_finding, sbatch, sign
from gatewright.spec.finding import Finding

XIDS = {
    13: "a kernel's exception (software more often than hardware)",
    31: "a memory page fault (software more often than hardware)",
    43: "the GPU stopped processing",
    45: "preemptive cleanup after an earlier fault",
    48: "a double-bit ECC error",
    61: "an internal microcontroller fault",
    62: "an internal microcontroller halt",
    63: "a memory page was retired or a row remapped",
    64: "a row could not be remapped",
    69: "a graphics engine exception",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of single-bit ECC errors",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
    119: "the GPU's system processor (GSP) does not answer",
    120: "a GSP error",
    149: "an NVLink fault",
}
"""NVIDIA Xid → meaning; source: NVIDIA's Xid catalogue."""
_SOFTWARE = {13, 31, 43, 45}


def xid(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """What the Xid means, and whether the node or the program is to blame."""
    number = seen.first.groups.get("xid", "")
    if not number.isdecimal() or len(number) > 4:
        return plain_finding(cause, seen, log)
    meaning = XIDS.get(int(number), "see NVIDIA's Xid catalogue")
    software = int(number) in _SOFTWARE
    return plain_finding(
        cause,
        seen,
        log,
        text=f"The NVIDIA driver reported Xid {number}: {meaning}.",
        confidence="likely" if software else "certain",
        fix=("Rule out the program first (CUDA_LAUNCH_BLOCKING=1); if it comes back on one node only, the node.",)
        if software
        else cause.fix,
    )


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW545",
        name="hsa-memory-fault",
        kind="gpu_fault_hsa",
        title="An AMD GPU reported a memory access fault",
        signs=(
            sign(
                "Memory access fault by GPU",
                pattern=r"Memory access fault by GPU node-(?P<gpu_node>\d+).*(?:Reason: (?P<reason>[^.\n]+))?",
            ),
            sign("HSA_STATUS_ERROR_MEMORY_FAULT", "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION"),
        ),
        text=(
            "An AMD GPU accessed memory that is not mapped: a kernel's bug, or driver, firmware and ROCm "
            "that do not match."
        ),
        why="The process is aborted without a Python traceback. A kernel of an extension (attention, "
        "quantisation) is the "
        "usual suspect; the same job on another node tells a bad node apart.",
        fix=(
            "Run again with AMD_SERIALIZE_KERNEL=3 and HIP_LAUNCH_BLOCKING=1 to get the kernel; switch "
            "attention to sdpa or "
            "eager as a test.",
            (
                "If it happens on one node only, leave the node out; if on all, compare driver, firmware and "
                "ROCm versions."
            ),
        ),
        changes=(env("AMD_SERIALIZE_KERNEL", "3"), env("HIP_LAUNCH_BLOCKING", "1")),
        outranks=6,
    ),
    Cause(
        code="GW546",
        name="hsa-queue-error",
        kind="gpu_fault_hsa",
        title="An AMD GPU's queue failed",
        signs=(
            sign("HSA_STATUS_ERROR", pattern=r"HSA_STATUS_ERROR_(?P<status>(?!MEMORY_FAULT)\w+)"),
            sign("HW Exception by GPU", "GPU Hang", "amdgpu: GPU reset", "amdgpu: ring"),
            sign("hipErrorIllegalAddress", "hipErrorLaunchFailure", "HIP error: unspecified launch failure"),
            sign(
                "amdgpu",
                pattern=r"amdgpu.*(?:\*ERROR\*|ring .* timeout|GPU fault|VM fault|page fault|RAS|uncorrectable)",
            ),
        ),
        text="An AMD GPU's queue failed ({status}).",
        why="A kernel hung or crashed, or the hardware did. RCCL's scratch reclaim is a known reason on MI300X.",
        fix=("Run again on another node; if it follows the job, bisect kernels (attention, grouped GEMM).",),
        changes=(env("HSA_NO_SCRATCH_RECLAIM", "1"), sbatch("--exclude", "that node")),
        outranks=5,
    ),
    Cause(
        code="GW547",
        name="xid",
        kind="gpu_fault_xid",
        title="The NVIDIA driver reported a fault (Xid)",
        signs=(
            sign("Xid", pattern=r"NVRM: Xid \([^)]*\): (?P<xid>\d+)|\bXid[ :=]+(?P<number>\d+)"),
            sign("fallen off the bus", "Unable to determine the device handle", "GPU is lost", "GPU requires reset"),
            sign("unspecified launch failure", "hardware stack error", "cudaErrorECCUncorrectable"),
            sign("uncorrectable ECC error", "uncorrectable NVLink error", "Uncorrectable ECC"),
            sign(
                "NVML",
                "nvidia-smi",
                pattern=r"(?:NVML|nvidia-smi).*(?:Unknown Error|GPU is lost|[Dd]river/library version mismatch)",
            ),
        ),
        text="The NVIDIA driver reported a fault of a GPU.",
        why="Faults such as 48, 74, 79, 95 are the hardware's. The job may hang instead of failing.",
        fix=("Leave the node out, report it, and resume from the last checkpoint.",),
        changes=(sbatch("--exclude", "that node"),),
        judge=xid,
        outranks=6,
    ),
    Cause(
        code="GW549",
        name="kernel-not-built-for-gpu",
        kind="gpu_invalid_device_function",
        title="The binary has no kernel for this GPU",
        confidence="certain",
        signs=(
            sign("invalid device function", "hipErrorInvalidDeviceFunction", "cudaErrorInvalidDeviceFunction"),
            sign("no kernel image is available", "hipErrorNoBinaryForGpu", "cudaErrorNoKernelImageForDevice"),
            sign(
                "not compatible with the current PyTorch installation",
                "Unable to find code object for all current devices",
            ),
            sign(
                "Cannot find Symbol",
                pattern=r"hipErrorNotFound|Cannot find Symbol with name|shared object initialization failed",
            ),
        ),
        text="PyTorch or an extension was not built for this GPU's architecture.",
        why="torch.cuda.get_arch_list() does not hold the card's architecture (gfx90a, gfx942, sm_90 …), or "
        "an extension was "
        "built for another one.",
        fix=(
            "Install a build that lists the architecture, or rebuild the extension with PYTORCH_ROCM_ARCH / "
            "TORCH_CUDA_ARCH_LIST set.",
        ),
        changes=(env("PYTORCH_ROCM_ARCH", "gfx90a (MI250X) or gfx942 (MI300X)"),),
        outranks=6,
    ),
    Cause(
        code="GW551",
        name="illegal-memory-access",
        kind="illegal_memory_access",
        title="A kernel accessed memory it must not",
        confidence="possible",
        signs=(
            sign("an illegal memory access was encountered", "cudaErrorIllegalAddress", "misaligned address"),
            sign("CUDA error: an illegal instruction", "Warp Illegal", "Warp Out-of-range"),
        ),
        text="A CUDA kernel accessed memory it must not; the Python line shown is not the place.",
        why=(
            "Errors of kernels appear at a later call. A token id out of range, a wrong cu_seqlens, or a bug "
            "of a fused kernel."
        ),
        fix=("Run again with CUDA_LAUNCH_BLOCKING=1 to see the kernel; switch attention to sdpa as a test.",),
        changes=(env("CUDA_LAUNCH_BLOCKING", "1"),),
        outranks=3,
    ),
    Cause(
        code="GW552",
        name="device-side-assert",
        kind="device_assert",
        title="An assertion inside a GPU kernel",
        signs=(
            sign("device-side assert triggered", "srcSelectDimSize", "Device-side assertion", "hipErrorAssert"),
            sign(
                "Assertion",
                pattern=r"Assertion `(?P<assertion>[^`']*(?:index|srcIndex|t >= 0|n_classes|idx|ind)[^`']*)['`] failed",
            ),
        ),
        text=(
            "An index is out of range inside a GPU kernel: most often a token id beyond the embedding, or a "
            "label out of range."
        ),
        why="Tokens were added to the tokenizer but the embedding was not enlarged, a pad id of -1, or "
        "labels outside the "
        "vocabulary that are not -100.",
        fix=(
            (
                "Compare len(tokenizer) with the embedding's rows; resize the embedding and train embed_tokens "
                "and lm_head."
            ),
            "Check that every label is -100 or below the vocabulary size.",
        ),
        outranks=5,
    ),
    Cause(
        code="GW553",
        name="segmentation-fault",
        kind="segfault",
        title="A crash in native code",
        role=Role.GENERIC,
        signs=(
            sign("Segmentation fault", "SIGSEGV", "Segfault encountered", "segfault at"),
            sign("exitcode", "exit code", pattern=r"exit ?code\s*:?\s*(?:-11\b|139\b)"),
            sign("Fatal Python error", pattern=r"Fatal Python error: (?P<error>.+)"),
            sign(
                "corrupted",
                "double free",
                "free(): invalid",
                pattern=r"malloc\(\): .*corrupt|corrupted (?:size|double-linked)|double free|free\(\): invalid",
            ),
        ),
        text="Native code crashed (segmentation fault).",
        why="A library built for another version of torch, ROCm or CUDA, two copies of one library, or a driver bug.",
        fix=("Run with PYTHONFAULTHANDLER=1 to see which call it was in; then rebuild or remove that extension.",),
        changes=(env("PYTHONFAULTHANDLER", "1"),),
        outranks=2,
    ),
    Cause(
        code="GW554",
        name="no-gpu",
        kind="no_gpu",
        title="No GPU for this process",
        confidence="certain",
        signs=(
            sign("No CUDA GPUs are available", "No HIP GPUs are available", "no CUDA-capable device is detected"),
            sign("invalid device ordinal", "hipErrorNoDevice", "Torch not compiled with CUDA enabled"),
            sign("Found no NVIDIA driver", "CUDA driver version is insufficient", "driver on your system is too old"),
            sign("Unexpected error from cudaGetDeviceCount", "Unexpected error from hipGetDeviceCount"),
            sign("busy or unavailable", pattern=r"CUDA-capable device\(s\) is/are busy or unavailable"),
        ),
        text="The process sees no usable GPU, or a number beyond those it sees.",
        why="Not asked for in the job (--gpus-per-node), hidden by two filters at once (ROCR_VISIBLE_DEVICES and "
        "HIP_VISIBLE_DEVICES), a driver older than the build, or more ranks than GPUs.",
        fix=("Print torch.cuda.device_count() and the visible-devices variables in every rank.",),
        outranks=5,
    ),
)
