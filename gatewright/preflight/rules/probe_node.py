"""GW933 to GW943: disk, memory, CPUs and caches of this machine as measured (probe.json), judged for the run."""

from gatewright.preflight.fault import Fault, Rule
from gatewright.preflight.job import Job
from gatewright.preflight.rules.probe import ended, local_ranks, said
from gatewright.spec.hardware import GIB

LEAST_INODES = 10_000
LEAST_SHM = 2**30
SLOW_SAVE_S = 300
SLOW_SHARE = 0.1
CPUS_A_RANK = 2
COMPILE_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")


def _kept(job: Job) -> int:
    """Checkpoints that lie on the disk at once: those kept, and the one being written."""
    if job.save_limit.value:
        return job.save_limit.value + 1
    if job.max_steps.value and job.save_steps.value:
        return max(2, job.max_steps.value // job.save_steps.value)
    return 3


def disk_is_too_full(job: Job) -> Fault | None:
    """Checkpoints of this run do not fit what is left: the run dies at a save, and may leave a torn one behind."""
    disk = job.probe.disk if job.probe else None
    if disk is None or job.checkpoint_bytes is None:
        return None
    count = _kept(job)
    need = count * job.checkpoint_bytes
    if need <= disk.free_bytes:
        return None
    return Fault(
        f"{count} checkpoints of {job.checkpoint_bytes / GIB:.1f} GiB are {need / GIB:.0f} GiB, and {disk.path} has "
        f"{disk.free_bytes / GIB:.1f} GiB left",
        (job.save_limit, job.output_dir, said(job, "free_bytes", disk.free_bytes)),
        "keep fewer checkpoints, or write elsewhere",
    )


def disk_is_too_slow(job: Job) -> Fault | None:
    """A save takes a large part of the time between two saves, or minutes in which every GPU waits."""
    disk = job.probe.disk if job.probe else None
    if disk is None or job.checkpoint_bytes is None:
        return None
    seconds = job.checkpoint_bytes / disk.write_bytes_per_s
    interval = job.step_s * job.save_steps.value if job.step_s and job.save_steps.value else None
    allowed = SLOW_SHARE * interval if interval else SLOW_SAVE_S
    if seconds <= allowed:
        return None
    of = f" of the {interval:.0f} s between two saves" if interval else ""
    return Fault(
        f"a checkpoint of {job.checkpoint_bytes / GIB:.1f} GiB takes {seconds:.0f} s{of} at the "
        f"{disk.write_bytes_per_s / 1e6:.0f} MB/s that {disk.path} ({disk.kind}) was measured to write",
        (job.save_steps, said(job, "write_bytes_per_s", round(disk.write_bytes_per_s))),
        "save less often, save the adapter alone, or write to a faster file system",
    )


def inodes_run_out(job: Job) -> Fault | None:
    """A file system can be full of files while half empty of bytes: `Disk quota exceeded` at a save or a data cache."""
    disk = job.probe.disk if job.probe else None
    if disk is None or disk.free_inodes is None or disk.free_inodes >= LEAST_INODES:
        return None
    return Fault(
        f"{disk.path} has {disk.free_inodes:,} inodes left",
        (job.output_dir, said(job, "free_inodes", disk.free_inodes)),
        "delete small files (caches, old checkpoints), or write elsewhere",
    )


def disk_refuses_to_write(job: Job) -> Fault | None:
    """A file could not be written and synced where the run will write: quota, rights, or a server that does not
    answer."""
    text = ended(job, "disk", "failed", "hung")
    if not text:
        return None
    return Fault(f"nothing can be written: {text}", (job.output_dir, said(job, "disk", text)), "write elsewhere")


def shm_is_too_small(job: Job) -> Fault | None:
    """Loader workers and NCCL exchange through /dev/shm; containers give it 64 MiB unless told otherwise. Too small is
    a bus error, hours in."""
    shm = job.probe.shm if job.probe else None
    if shm is None or shm.free_bytes >= LEAST_SHM:
        return None
    return Fault(
        f"/dev/shm has {shm.free_bytes / 2**20:,.0f} MiB free of {shm.total_bytes / 2**20:,.0f}",
        (said(job, "free_bytes", shm.free_bytes),),
        "give the container more: --shm-size=16g or --ipc=host",
    )


def _host_bytes(job: Job) -> tuple[int, str]:
    """Host memory that loading, offloading or saving takes on one node, whichever takes most, and in words."""
    copy = 0
    if job.save_in_background.value and job.checkpoint_bytes is not None:
        # Each rank keeps a copy of what it writes; adapters are written by one.
        copy = job.checkpoint_bytes // (job.nodes.get(1) if job.full else 1)
    return max(_load_bytes(job), (copy, "the copy that saves in the background are written from"))


def _load_bytes(job: Job) -> tuple[int, str]:
    """Host memory that loading and offloading take on one node, and in words."""
    if job.shape is None:
        return 0, ""
    whole = 2 * job.shape.parameters
    if job.offload_optimizer.value == "cpu" and job.full:
        return 12 * job.shape.parameters // job.nodes.get(1), "offloaded optimizer state, 12 B a parameter"
    if job.fsdp.value and job.fsdp_ram_efficient.value is False:
        return whole * local_ranks(job), f"one copy of the weights for each of {local_ranks(job)} ranks"
    if job.fsdp.value or job.zero.value == 3:
        return whole, "one copy of the weights"
    return 0, ""


def host_memory_is_short(job: Job) -> Fault | None:
    """The node, or the control group of the job, has less memory than loading or a save in the background takes: the
    kernel kills the process without a word in the log."""
    machine = job.probe.machine if job.probe else None
    need, words = _host_bytes(job)
    if machine is None or not need:
        return None
    have = machine.available_bytes
    if machine.limit_bytes is not None:
        have = min(have, machine.limit_bytes - (machine.limit_used_bytes or 0))
    if need <= have:
        return None
    return Fault(
        f"{need / GIB:.0f} GiB of host memory on a node ({words}), and this job may have {have / GIB:.1f}",
        (job.model, said(job, "available_bytes", have)),
        "load on rank 0 alone (fsdp_cpu_ram_efficient_loading), save in the foreground (train.save_in_background: "
        "false), or ask the queue for more memory",
    )


def cpu_mask_is_too_narrow(job: Job) -> Fault | None:
    """The ranks of a node share fewer cores than they have threads that must run: the loader and the launches of
    kernels wait for each other, and the GPUs for both."""
    machine = job.probe.machine if job.probe else None
    ranks = local_ranks(job)
    if machine is None or len(machine.usable_cpus) >= CPUS_A_RANK * ranks:
        return None
    return Fault(
        f"{ranks} ranks on a node, and {len(machine.usable_cpus)} of {machine.cpus} CPUs may be used",
        (job.cpus_per_task, said(job, "usable_cpus", len(machine.usable_cpus))),
        "ask for CPUs (--cpus-per-task), and check --cpu-bind",
    )


def compile_cache_is_shared(job: Job) -> Fault | None:
    """Compilers lock and rename in their cache; on a file system of many nodes that corrupts it, or stalls all ranks
    (Lustre at 128 ranks, MIOpen's SQLite)."""
    shared = (
        [cache for cache in (job.probe.caches or []) if cache.variable in COMPILE_CACHES and cache.shared]
        if job.probe
        else []
    )
    if not shared:
        return None
    first = shared[0]
    return Fault(
        f"{first.variable} is {first.path} on {first.kind}",
        (said(job, first.variable, first.path),),
        f"set {' and '.join(cache.variable for cache in shared)} to a folder on the node, one a job",
    )


def cache_cannot_be_written(job: Job) -> Fault | None:
    """A tool that writes here without being asked will fail, some of them in the middle of the first step."""
    closed = [cache for cache in (job.probe.caches or []) if not cache.writable] if job.probe else []
    if not closed:
        return None
    first = closed[0]
    return Fault(
        f"{first.variable} is {first.path}, which cannot be written",
        (said(job, first.variable, first.path),),
        f"set {first.variable} to a folder that this job may write",
    )


def clock_is_not_synchronised(job: Job) -> Fault | None:
    """Logs of several nodes cannot be put in order, and certificates and leases may be refused."""
    machine = job.probe.machine if job.probe else None
    if machine is None or machine.clock_synchronised is not False or job.nodes.get(1) < 2:
        return None
    return Fault(
        f"{job.nodes}, and the clock of {job.probe.host if job.probe else ''} is not synchronised",
        (job.nodes, said(job, "clock_synchronised", False)),
        "tell the administrators; until then order events by step, not by time",
    )


def measurement_hung(job: Job) -> Fault | None:
    """A measurement did not come back: a call into the driver or the file system hangs, as the run's will."""
    own = ("attention", "four_bit", "groups", "disk")
    hung = [item for item in job.probe.outcomes if item.status == "hung" and item.name not in own] if job.probe else []
    if not hung:
        return None
    return Fault(
        f"{', '.join(item.name for item in hung)}: {hung[0].text}",
        (said(job, hung[0].name, hung[0].text),),
        "leave this node out, and report it",
    )


_PROBE = "gatewright probe"
RULES = (
    Rule("GW933", "error", disk_is_too_full, "arithmetic: checkpoints kept × bytes of one"),
    Rule("GW934", "warning", disk_is_too_slow, "arithmetic: bytes of a checkpoint / measured bytes a second"),
    Rule("GW935", "warning", inodes_run_out, "MEDS-DEV#266"),
    Rule("GW936", "error", disk_refuses_to_write, _PROBE),
    Rule("GW937", "warning", shm_is_too_small, "Docker's default of 64 MiB; NVIDIA/Megatron-LM#878"),
    Rule("GW938", "error", host_memory_is_short, "arithmetic: 2 bytes a parameter; 2U1/Qwen-VL-Finetune#135"),
    Rule("GW939", "warning", cpu_mask_is_too_narrow, "LUMI's documentation: distribution and binding"),
    Rule("GW940", "warning", compile_cache_is_shared, "ROCm/MIOpen#1878"),
    Rule("GW941", "error", cache_cannot_be_written, _PROBE),
    Rule("GW942", "note", clock_is_not_synchronised, "adjtimex(2)"),
    Rule("GW943", "error", measurement_hung, "pytorch/pytorch#192259"),
)
