"""Storage: quotas, full disks, shared memory, too many files, file systems that went away."""

from gatewright.doctor.cause import Cause, Log, Seen, env, plain_finding, sign
from gatewright.spec.finding import Finding


def no_space(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """A full disk, unless the path is /dev/shm: then it is shared memory."""
    near = "\n".join((*seen.first.before[-12:], seen.first.line, *seen.first.after[:4]))
    if "/dev/shm" in near or "shared memory" in near or "torch_shm" in near or "SharedMemory" in near:
        return plain_finding(SHARED_MEMORY, seen, log)
    return plain_finding(cause, seen, log)


SHARED_MEMORY = Cause(
    code="GW568",
    name="shared-memory",
    kind="shm",
    title="Shared memory (/dev/shm) is full",
    signs=(
        sign("Bus error", "SIGBUS", pattern=r"[Bb]us error|SIGBUS"),
        sign(
            "shared memory",
            pattern=(
                r"(?:insufficient|out of|[Uu]nable to|[Ee]rror while|failed to|could not|[Cc]annot).{0,60}shared "
                r"memory|shared memory.{0,80}(?:failed|insufficient|No space|exceed)"
            ),
        ),
        sign(
            "/dev/shm",
            pattern=(
                r"/dev/shm.{0,120}(?:No space|full|too small|insufficient|failed|[Ee]rror)|(?:No space|full|"
                r"[Ff]ailed|[Ee]rror).{0,160}/dev/shm"
            ),
        ),
        sign(
            "shm-size",
            "torch_shm_manager",
            "SharedMemory",
            pattern=r"--shm-size|torch_shm_manager.*(?:error|failed)|SharedMemory.*(?:No space|Errno)",
        ),
        sign("exitcode", pattern=r"exitcode\s*:?\s*-7\b"),
    ),
    text="Shared memory is too small: data workers or NCCL could not get their buffers.",
    why="Containers start with 64 MB of /dev/shm. It prints `No space left on device` as well: that is not the disk.",
    fix=("Give the container more (--shm-size=16g, --ipc=host), or use fewer data workers.",),
    outranks=6,
)

CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW565",
        name="quota",
        kind="disk_quota",
        title="A quota, not the disk",
        confidence="certain",
        signs=(
            sign(
                "Disk quota exceeded",
                "disk quota exceeded",
                "FilesystemQuotaExceeded",
                "quota exceeded",
                "Quota exceeded",
            ),
            sign("EDQUOT", "[Errno", "os error", "code:", pattern=r"EDQUOT|\[Errno 122\]|os error 122|code: 122"),
            sign("inode", pattern=r"(?:inode|file).{0,20} (?:quota|limit) (?:exceeded|reached)|no (?:free )?inodes"),
        ),
        text=(
            "A quota is used up: bytes or number of files, of the user or the project; the disk itself may "
            "be half empty."
        ),
        why="Caches in a small home directory, or many small files of checkpoints. df does not show quotas.",
        fix=(
            "Look at both limits (lfs quota, quota -s: bytes and files), delete old checkpoints, move caches.",
            "Before the run keep three checkpoints' size free.",
        ),
        changes=(env("HF_HOME", "a folder on scratch"),),
        outranks=6,
    ),
    Cause(
        code="GW566",
        name="disk-full",
        kind="disk_full",
        title="The disk is full",
        signs=(
            sign("No space left on device", "StorageFull", "ENOSPC"),
            sign("os error", "code:", "[Errno", pattern=r"os error 28|code: 28\b|\[Errno 28\]"),
            sign(
                "disk is full",
                "Disk full",
                "disk full",
                "Not enough disk space",
                "not enough free disk space",
                "Not enough free disk space",
                "not enough disk space",
            ),
            sign(
                "PytorchStreamWriter",
                "inline_container",
                "unexpected pos",
                "iostream error",
                "requested and",
                pattern=(
                    r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. (?:unexpected pos|enforce "
                    r"fail)|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error|\d+ requested and \d+ written"
                ),
            ),
            sign("FileNotFoundError", pattern=r"not enough (?:free )?(?:disk )?space"),
        ),
        text="A file system is full; what was being written is incomplete.",
        why="Often /tmp of the node, or scratch after several checkpoints. The file being written is cut "
        "off: do not resume "
        "from it.",
        fix=("Free space where the message points, remove the incomplete checkpoint, keep fewer of them.",),
        judge=no_space,
        outranks=5,
    ),
    Cause(
        code="GW567",
        name="file-system-error",
        kind="io_error",
        title="The file system failed",
        signs=(
            sign(
                "Input/output error",
                "Read-only file system",
                "Transport endpoint",
                "Cannot send after transport endpoint",
            ),
            sign(
                "Stale file handle",
                "Remote I/O error",
                "[Errno ",
                pattern=r"Stale (?:NFS )?file handle|Remote I/O error",
            ),
            sign("Lustre", pattern=r"Lustre(?:Error)?:.*(?:evict|error|timed out|Connection .* lost)"),
        ),
        text="A file system failed under the run: I/O error, stale handle, or mounted read-only.",
        why="A server of the network file system was lost, or the node's mount was evicted.",
        fix=("Run again on another node; check the newest checkpoint before it is used.",),
        outranks=4,
    ),
    SHARED_MEMORY,
    Cause(
        code="GW569",
        name="too-many-open-files",
        kind="too_many_files",
        title="Too many open files or processes",
        signs=(
            sign("Too many open files", "too many open files", "items of ancdata"),
            sign(
                "Resource temporarily unavailable",
                pattern=(
                    r"(?:fork|pthread_create|OpenBLAS|thread|\[Errno 11\]|BlockingIOError|RuntimeError).*Resource "
                    r"temporarily unavailable"
                ),
            ),
            sign("start new thread", "pthread_create failed"),
        ),
        text="A limit of open files or processes is reached.",
        why="Data workers pass tensors as file descriptors; each rank times each worker adds up.",
        fix=("Raise the limit (ulimit -n 65536), or torch.multiprocessing.set_sharing_strategy('file_system').",),
        outranks=7,
    ),
    Cause(
        code="GW573",
        name="permission-denied",
        kind="permission",
        title="Not allowed to read or write a path",
        signs=(
            sign(
                "Permission denied",
                pattern=(
                    r"(?:PermissionError|Errno 13|cannot (?:open|create|access)).*Permission denied(?:: "
                    r"'?(?P<path>[^']+)'?)?"
                ),
            ),
        ),
        text="A path cannot be read or written: {path}.",
        why="A cache or output folder of somebody else, or a read-only place inside a container.",
        fix=("Point the output and the caches (HF_HOME, TRITON_CACHE_DIR) to a folder that you own.",),
        outranks=2,
    ),
)
