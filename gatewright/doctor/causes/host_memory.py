"""Host memory: killed from outside, by the kernel or by SLURM, or refused by the system."""

import re
from dataclasses import replace

from gatewright.doctor.cause import Cause, Log, Role, Seen, plain_finding, sbatch, sign
from gatewright.spec.finding import Confidence, Finding

_WHY = (
    "The processes of the job used more host memory than its cgroup or the node has. Usual takers: "
    "every rank loading the "
    "whole checkpoint, optimizer offload at save, data workers that copy the data set, a merge of large weights."
)
_FIX = (
    "Ask for more memory, or use less: one loader a node (low_cpu_mem_usage, safetensors), fewer data workers, no "
    "optimizer offload while saving.",
)


_MERGING = re.compile(r"merge_and_unload|save_pretrained_merged|merge_lora|merge_adapter|[Mm]erging")


def killed_process(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """A kill by signal 9: host memory is the usual reason, unless the log names another one."""
    if log.kinds & {"time_limit", "preempted", "node_fail", "requeued"}:
        return None
    context = "\n".join((*seen.first.before[-30:], seen.first.line))
    loading = "checkpoint shards" in context or "Loading weights" in context or "from_pretrained" in context
    merging = _MERGING.search(context) is not None
    when = " while an adapter was merged" if merging else " while the model was loaded" if loading else ""
    text = f"A process was killed by signal 9{when} and left no traceback: most likely out of host memory."
    confidence: Confidence = "likely" if loading or merging else cause.confidence
    return _of_merge(plain_finding(cause, seen, log, text=text, confidence=confidence), merging)


def refused(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """An allocation that failed; a merge is told apart, since it has another remedy."""
    first = seen.first
    return _of_merge(
        plain_finding(cause, seen, log), _MERGING.search("\n".join((*first.before, first.line))) is not None
    )


def _of_merge(found: Finding, merging: bool) -> Finding:
    if not merging:
        return found
    fix = ("Merge shard by shard, or where host memory holds one copy of the weights in 16 bit.", *found.fix)
    return replace(found, kind="host_oom_merge", fix=fix)


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW515",
        name="host-oom-slurm",
        kind="host_oom",
        title="SLURM's memory limit",
        confidence="certain",
        signs=(
            sign("oom-kill event", "oom_kill event", pattern=r"[Dd]etected (?P<events>\d+) oom[-_]kill event"),
            sign(
                "Exceeded step memory limit",
                "have been OOM Killed",
                "OUT_OF_ME",
                "Exceeded job memory limit",
                "exceeded memory limit",
            ),
            sign("memory limit", pattern=r"(?:job|step|Job|Step)\b.* exceeded (?:virtual )?memory limit"),
            sign("Out Of Memory", pattern=r"(?:task \d+|srun: error).*Out Of Memory"),
        ),
        text="SLURM's cgroup ran out of host memory and its processes were killed.",
        why=_WHY
        + " SLURM reports it at the end; a batch script that goes on after the killed step even ends COMPLETED.",
        fix=_FIX,
        changes=(sbatch("--mem", "more than now (LUMI-G: 480G a node, 60G a GPU)"),),
        outranks=6,
    ),
    Cause(
        code="GW516",
        name="host-oom-kernel",
        kind="host_oom",
        title="The kernel's OOM killer",
        confidence="certain",
        signs=(
            sign(
                "Killed process",
                pattern=r"Out of memory: Killed process (?P<pid>\d+)|oom-kill:|Memory cgroup out of memory",
            ),
            sign("oom-kill:", "invoked oom-killer", "Memory cgroup out of memory", "oom_reaper"),
            sign("cgroup out-of-memory handler", "memory pressure (OOM)", "node running low on memory"),
            sign("systemd-oomd", "earlyoom", "paging file is too small"),
            sign("OOMKilled", "OOM killer", "OOM Killer", "oom-killer", "oom killer"),
        ),
        text="The kernel's OOM killer ended a process of the run: the node ran out of host memory.",
        why=_WHY,
        fix=_FIX,
        outranks=9,
    ),
    Cause(
        code="GW517",
        name="killed-without-traceback",
        kind="host_oom",
        title="Killed by signal 9 without a word",
        role=Role.GENERIC,
        confidence="possible",
        signs=(
            sign("exitcode", "exit code", pattern=r"exit ?code\s*:?\s*-9\b|exit ?code:? 137\b"),
            sign(
                "SIGKILL",
                pattern=(
                    r"(?:[Ss]ignal 9|-9)\b.*SIGKILL|died with <Signals\.SIGKILL|"
                    r"SIGKILL.*(?:received|by PID)|with signal SIGKILL"
                ),
            ),
            sign("Exited with exit code", pattern=r"Exited with exit code 137"),
            sign(
                "Killed",
                pattern=(
                    r"^\s*(?:\S+: line \d+:\s+\d+ )?Killed\b|\]Killed\s*$|: Killed$|\s\d+ "
                    r"Killed\s+\S|,[^,]*Killed$"
                ),
            ),
            sign(
                "return code",
                "returned code",
                "exit status",
                "exit code",
                "Exit code",
                "Exit Code",
                "ExitCode",
                pattern=(
                    r"return(?:ed)? code:? ?=? ?(?:-9|137)\b|[Ee]xit (?:[Ss]tatus|[Cc]ode):? "
                    r"?137\b|ExitCode[=:]0:9\b"
                ),
            ),
            sign(
                "killed:",
                "Killed:",
                "signal",
                pattern=(
                    r"[Kk]illed: 9\b|zsh: killed|^\[\d+\]\s+(?:[+-]\s+)?\d+ killed|(?:exited|"
                    r"terminated|died|ended) (?:with|by|on) signal:? "
                    r"?(?:9\b|SIGKILL|KILL)"
                ),
            ),
            sign("killed by signal", pattern=r"killed by signal:? (?:9|Killed)"),
        ),
        text="A process was killed by signal 9.",
        why="Signal 9 leaves no traceback. It comes from the OOM killer, from SLURM (limits, cancel), or by hand. "
        + _WHY,
        fix=(
            "Look for oom-kill in dmesg, or ask SLURM: sacct -j JOB --format=State,ExitCode,MaxRSS.",
            *_FIX,
        ),
        judge=killed_process,
        outranks=2,
    ),
    Cause(
        code="GW518",
        name="host-allocation-refused",
        kind="host_oom",
        title="The system refused memory to the process",
        signs=(
            sign(
                "DefaultCPUAllocator",
                pattern=(
                    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:.*allocate (?P<bytes>\d+) "
                    r"bytes)?"
                ),
            ),
            sign(
                "Cannot allocate memory",
                pattern=(
                    r"(?:\[?[Ee]rrno 12\]?|code[:=] 12|fork|mmap|OSError|pthread|std::).*Cannot allocate memory|"
                    r"Cannot allocate memory"
                ),
            ),
            sign("MemoryError", pattern=r"(?:^|[^\w.])(?:numpy\.\w+\.\w*)?_?(?:Array)?MemoryError\b"),
            sign("std::bad_alloc", "bad_alloc"),
            sign("Unable to allocate", pattern=r"Unable to allocate (?P<size>[\d.]+ [KMGT]iB) for an array"),
            sign("ArrowMemoryError", "malloc of size", pattern=r"ArrowMemoryError|malloc of size \d+ failed"),
            sign(
                "cudaHostAlloc",
                "hipHostMalloc",
                "pin_memory",
                pattern=r"(?:cudaHostAlloc|hipHostMalloc|pin_memory).*(?:failed|out of memory|error)",
            ),
        ),
        text="The system refused host memory to the process.",
        why=_WHY,
        fix=_FIX,
        judge=refused,
        outranks=4,
    ),
    Cause(
        code="GW519",
        name="data-worker-killed",
        kind="host_oom",
        title="A data loading worker was killed",
        confidence="likely",
        signs=(
            sign(
                "DataLoader worker",
                pattern=(
                    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: "
                    r"Killed|exited unexpectedly)"
                ),
            ),
            sign("BrokenProcessPool", "subprocesses has abruptly died"),
        ),
        text="A worker process of the data loading or tokenising died: host memory is the usual reason.",
        why=(
            "Each worker holds its own copy of what the data set keeps in Python objects; copies grow as "
            "they are touched."
        ),
        fix=("Fewer workers, or data in a memory-mapped format.", *_FIX),
        outranks=5,
    ),
)
