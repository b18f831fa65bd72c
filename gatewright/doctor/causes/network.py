"""Communication: collectives that never ended, connections lost, ports, and what only follows from them."""

import re
from dataclasses import replace

from gatewright.doctor.cause import Cause, Log, Role, Seen, Sighting, env, plain_finding, sign
from gatewright.doctor.causes.training import ZERO3_MOE
from gatewright.spec.finding import Finding

_SEQUENCE = re.compile(r"SeqNum=(\d{1,18}), OpType=(\w+)")
_WHO = re.compile(r"\[Rank (\d+)\]")
_ELEMENTS = re.compile(r"NumelIn=(\d+)")
_ZERO3_OPS = {"_ALLGATHER_BASE", "ALLGATHER_COALESCED", "_REDUCE_SCATTER_BASE", "_REDUCE_SCATTER", "ALLGATHER"}
_ZERO3 = re.compile(
    r"[Zz]e[Rr][Oo][-_ ]?(?:[Ss]tage)?[-_ ]?3|stage3\.py|partitioned_param|Invalidate trace cache|stage['\"]?: 3"
)
_MOE = re.compile(r"[Mm]o[Ee]\b|mixtral|[Mm]ixtral|experts?\b|SparseMoe|A3B|A22B|deepseek", re.IGNORECASE)


def collective_timeout(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """Late rank or diverged ranks, by the sequence numbers each rank was waiting for."""
    stuck = _stuck(seen)
    context = "\n".join((*seen.first.before, seen.first.line, *seen.first.after))
    operations = {operation for _, operation, _ in stuck.values()}
    if operations & _ZERO3_OPS and _ZERO3.search(context) and _MOE.search(context):
        return plain_finding(ZERO3_MOE, seen, log, confidence="likely", numbers=tuple(_numbers(stuck)))
    sequences = {sequence for sequence, _, _ in stuck.values()}
    if not stuck:
        return plain_finding(cause, seen, log)
    if len(stuck) == 1:
        rank, (sequence, operation, _) = next(iter(stuck.items()))
        text = (
            f"Rank {rank} waited in vain for {operation} number {sequence}: another rank is late, dead, or in another "
            "collective; its log has the reason."
        )
        return plain_finding(cause, seen, log, text=text, numbers=tuple(_numbers(stuck)))
    if len(sequences) == 1 and len(operations) == 1:
        text = (
            f"{len(stuck)} ranks waited in vain for {operations.pop()} number {sequences.pop()}, the same one: a rank "
            f"that is not among them ({_ranks(stuck)}) is late or dead."
        )
        return plain_finding(cause, seen, log, text=text, numbers=tuple(_numbers(stuck)))
    low, high = (pick(stuck.items(), key=lambda item: item[1][0]) for pick in (min, max))
    text = (
        f"The ranks ran different collectives: rank {low[0]} waited for {low[1][1]} number {low[1][0]}, "
        f"rank {high[0]} for {high[1][1]} number {high[1][0]}. Their paths through the program diverged."
    )
    return plain_finding(cause, seen, log, text=text, numbers=tuple(_numbers(stuck)), fix=_DIVERGED)


def rccl_transport(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """The warnings as they are; rings without trees only where the run then did no step."""
    rings = [s for s in seen.sightings if "Connected all rings" in s.line]
    trees = [s for s in seen.sightings if "Connected all trees" in s.line and "Connected all rings" not in s.line]
    others = tuple(s for s in seen.sightings if "Connected all" not in s.line)
    if rings and not trees and not log.steps and not log.kinds - {"rccl_hang", "nccl_timeout"}:
        text = "The communicator connected its rings and never its trees: its set-up is dead-locked."
        return plain_finding(cause, seen, log, text=text, confidence="likely")
    if not others:
        return None
    return plain_finding(cause, replace(seen, sightings=others, occurrences=len(others)), log)


_DIVERGED = (
    "Look for a branch that depends on the rank's data: a module that only some ranks run (experts "
    "without tokens, unused "
    "parameters), uneven batch counts, evaluation or saving on some ranks only.",
    "Find the first call that differs: TORCH_DISTRIBUTED_DEBUG=DETAIL, or the flight recorder.",
)


def _stuck(seen: Seen) -> dict[str, tuple[int, str, str]]:
    """Rank → (sequence number, operation, elements) of the collective it was stuck in first."""
    found: dict[str, tuple[int, str, str]] = {}
    for position, sighting in enumerate(seen.sightings):
        for text in _lines(sighting):
            if sequence := _SEQUENCE.search(text):
                who = _WHO.search(text)
                rank = (
                    who[1] if who else str(sighting.place.rank if sighting.place.rank is not None else f"?{position}")
                )
                elements = _ELEMENTS.search(text)
                found.setdefault(rank, (int(sequence[1]), sequence[2], elements[1] if elements else ""))
                break
    return found


def _lines(sighting: Sighting) -> tuple[str, ...]:
    return (sighting.line, *sighting.after[:2])


def _ranks(stuck: dict[str, tuple[int, str, str]]) -> str:
    return ", ".join(sorted(stuck, key=lambda rank: (len(rank), rank))[:16])


def _numbers(stuck: dict[str, tuple[int, str, str]]) -> list[tuple[str, int | str]]:
    return [(f"rank_{rank}", f"{operation} {sequence}") for rank, (sequence, operation, _) in list(stuck.items())[:16]]


_LOST = "The connection to a process that ended was closed. The reason is in the log of the rank that ended first."

CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW535",
        name="collective-timeout",
        kind="nccl_timeout",
        title="A collective that never ended",
        role=Role.CASCADE,
        signs=(
            sign("Watchdog caught collective operation timeout", "collective operation timeout"),
            sign("last enqueued", pattern=r"last enqueued (?:NCCL )?work: \d+, last completed (?:NCCL )?work"),
            sign(
                "Timed out waiting",
                "timed out waiting",
                pattern=r"[Tt]imed out waiting (?:\d+ms )?for (?:send|recv|operation|.*collective|clients|.*barrier)",
            ),
            sign(
                "monitoredBarrier",
                "failed to pass monitored",
                pattern=r"[Rr]anks? .*failed to pass monitoredBarrier|monitoredBarrier.*(?:timed out|failed)",
            ),
            sign(
                "retrieving ncclUniqueId",
                "wait timeout after",
                "Timeout waiting for key",
                pattern=r"ncclUniqueId .*[Tt]imeout|wait timeout after \d+ ?ms|Timeout waiting for key",
            ),
            sign("waiting for clients", pattern=r"Timed out after \d+ seconds waiting for clients"),
            sign("detected as timed out", "NCCL timeout", "nccl timeout", "NCCL operation timed out", "NCCL Timeout"),
            sign(
                "Heartbeat monitor timed out",
                "HeartbeatMonitor",
                "stuck",
                pattern=r"[Hh]eartbeat [Mm]onitor timed out|watchdog (?:thread .*|got )stuck",
            ),
            sign(
                "timed out in blocking wait",
                "Timeout(ms)=",
                pattern=r"Timeout\(ms\)=\d+\) ran for|timed out in blocking wait",
            ),
        ),
        text="A collective did not end in time: a rank is late, dead, or in another collective.",
        why="The watchdog reports where a rank waits, not why the other one did not come. Equal sequence "
        "numbers on all ranks "
        "that report: one rank is missing. Different numbers: the ranks ran different collectives.",
        fix=(
            "Look for the earliest error in the logs of the other ranks; if there is none, find what they were doing "
            "(py-spy dump, or the flight recorder).",
            "If a rank was only slow (loading, tokenising, saving on one rank), give it time: a longer timeout in "
            "init_process_group.",
        ),
        changes=(env("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"), env("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")),
        judge=collective_timeout,
        outranks=3,
        keep=32,
    ),
    Cause(
        code="GW536",
        name="peer-lost",
        kind="nccl_remote",
        title="A peer that went away",
        role=Role.CASCADE,
        signs=(
            sign("ncclRemoteError", "remote process exited", "closed by remote peer", "Connection closed by remote"),
            sign(
                "Connection reset by peer",
                "Broken pipe",
                pattern=(
                    r"(?:RuntimeError:|NCCL|[Ss]ocket|recvBytes|sendBytes|TCPStore|gloo|Gloo|"
                    r"c10d|\[Errno 104\]).*(?:Connection "
                    r"reset by peer|Broken pipe)"
                ),
            ),
            sign("Connection closed by peer", "socket was closed", "recvValue failed", "failed to recv, got"),
            sign("NCCL communicator was aborted", "ncclCommAbort", "communicator was aborted"),
            sign("Some NCCL operations have failed or timed out", "we are taking the entire process down"),
            sign("to avoid data inconsistency", "To avoid data inconsistency"),
        ),
        text="The connection to another rank broke: that process ended first.",
        why=_LOST,
        fix=("Find the rank that ended first and read its log.",),
        outranks=2,
    ),
    Cause(
        code="GW537",
        name="network-failed",
        kind="nccl_error",
        title="The network under NCCL or RCCL failed",
        role=Role.GENERIC,
        confidence="likely",
        signs=(
            sign(
                "ncclSystemError",
                "ncclInternalError",
                "ncclUnhandledCudaError",
                "unhandled system error",
                "unhandled cuda error",
            ),
            sign(
                "NCCL WARN",
                pattern=(
                    r"NCCL WARN (?:.*IBV_WC|NET/IB ?: .*(?:error|failed)|Call to (?:connect|bind|ibv_\w+).* failed|"
                    r".*Bootstrap ?: no socket interface)"
                ),
            ),
            sign("ibv_", "libfabric", pattern=r"ibv_\w+ failed|libfabric.*(?:error|failed)|OFI .*(?:error|failed)"),
            sign(
                "Connection refused",
                "No route to host",
                pattern=(
                    r"(?:NCCL|TCPStore|gloo|c10d|rendezvous|connectFullMesh|MASTER_ADDR).*(?:Connection refused|No "
                    r"route to host)"
                ),
            ),
            sign(
                "RendezvousConnectionError",
                "RendezvousTimeoutError",
                "DistNetworkError",
                "client socket has failed to connect",
                "client socket has timed out",
            ),
        ),
        text="NCCL or RCCL could not use the network.",
        why="Wrong interface, a missing plugin (aws-ofi-rccl, librccl-net), a blocked port, or a fault of the fabric.",
        fix=(
            "Run once with NCCL_DEBUG=INFO and check the transport it chose; name the interface (LUMI-G: "
            "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3).",
        ),
        changes=(env("NCCL_DEBUG", "INFO"),),
        outranks=2,
    ),
    Cause(
        code="GW538",
        name="rccl-transport",
        kind="rccl_hang",
        title="RCCL without its network plugin, or stopped half-way in its set-up",
        role=Role.HINT,
        severity="warning",
        confidence="possible",
        signs=(
            sign("iommu=pt", "system instablity or hang", "system instability or hang"),
            sign("NET/OFI", pattern=r"NET/OFI.*(?:initialization failed|[Uu]nable|not found|failed)"),
            sign("librccl-net", pattern=r"No plugin found \(librccl-net\.so\)|librccl-net.*(?:not found|cannot open)"),
            sign("Connected all rings", "Connected all trees"),
            sign("RCCL", pattern=r"RCCL.*(?:hang|hung|stuck|deadlock|time(?:d )?out)"),
            sign("kdreg", "FI_MR_CACHE_MONITOR", pattern=r"kdreg2?.*(?:error|fail|hang)|FI_MR_CACHE_MONITOR"),
        ),
        text="RCCL runs on its fallback transport or did not finish its set-up: a known way to a hang.",
        why="Without the OFI plugin RCCL goes over TCP. `Connected all rings` that is never followed by "
        "`Connected all trees` is "
        "a dead-lock in the set-up; a second communicator without device_id is another.",
        fix=(
            "On Slingshot: FI_MR_CACHE_MONITOR=userfaultfd, and a container whose log says `Selected Provider is cxi`.",
            "Pass device_id to init_process_group.",
        ),
        changes=(env("FI_MR_CACHE_MONITOR", "userfaultfd"), env("NCCL_DEBUG", "INFO")),
        judge=rccl_transport,
        outranks=1,
        keep=64,
    ),
    Cause(
        code="GW540",
        name="child-failed",
        kind="rank_failed",
        title="The launcher reports a failed worker",
        role=Role.CASCADE,
        confidence="likely",
        signs=(
            sign("ChildFailedError", "Root Cause (first observed failure)", "subprocess.CalledProcessError"),
            sign("failed (exitcode", pattern=r"failed \(exitcode:? (?!-9)-?\d+\) local_rank: (?P<local_rank>\d+)"),
            sign(
                "exits with return code",
                "main process exited",
                pattern=r"exits with return code = (?!-9)-?\d+|main process exited",
            ),
            sign("ProcessExitedException", "ProcessRaisedException"),
        ),
        text="The launcher ended because a worker failed; its error comes before.",
        why="torchrun and deepspeed print this for any failure of a worker.",
        fix=("Read the first traceback above, or the log of the worker it names.",),
    ),
    Cause(
        code="GW541",
        name="terminated",
        kind="terminated",
        title="Ended by a signal of the launcher",
        role=Role.CASCADE,
        severity="note",
        confidence="likely",
        signs=(
            sign(
                "closing signal",
                pattern=r"[Cc]losing (?:process|signal) .*|SIGTERM closing signal|closing signal SIG(?:TERM|INT)",
            ),
            sign("Killing subprocess", "sigkill_handler"),
            sign("death signal", "SignalException", "Received Signals.SIGTERM", "Terminating StepId"),
            sign("Terminated", pattern=r"(?:^|: )Terminated\s*$"),
            sign("KeyboardInterrupt"),
            sign("exitcode", pattern=r"exitcode\s*:?\s*-15\b"),
        ),
        text="Processes were ended by TERM or INT: a consequence, or somebody stopped the run.",
        why="The launcher ends the other workers when one fails; SLURM ends all at its limits.",
        fix=("Look for the failure before it.",),
    ),
    Cause(
        code="GW542",
        name="device-id-unknown",
        kind="rccl_hang",
        title="Rank and GPU are not tied to each other",
        role=Role.HINT,
        severity="warning",
        confidence="possible",
        signs=(
            sign(
                "using GPU",
                pattern=r"using GPU \d+ .*(?:perform barrier|as device used by this process is currently unknown).*",
            ),
            sign("No device id is provided via", "device used by this process is currently unknown"),
            sign(
                "Guessing device ID",
                "device_ids in barrier",
                pattern=r"Guessing device ID|Specify device_ids in barrier",
            ),
            sign("Duplicate GPU detected"),
        ),
        text="The process group does not know which GPU each rank uses; a wrong guess hangs.",
        why="NCCL and RCCL guess the device from the rank. Where ranks and GPUs are mapped otherwise, two "
        "ranks share a GPU, or "
        "the second communicator hangs.",
        fix=("init_process_group(..., device_id=torch.device('cuda', LOCAL_RANK)).",),
    ),
    Cause(
        code="GW543",
        name="port-in-use",
        kind="port_in_use",
        title="The rendezvous port is taken",
        confidence="certain",
        signs=(
            sign("EADDRINUSE", "Address already in use", "address already in use", "server socket has failed to"),
            sign("port", pattern=r"(?:port|Port) (?P<port>\d+) (?:is )?(?:already )?(?:in use|taken|occupied)"),
        ),
        text="The port of the rendezvous is in use by another process of this node.",
        why="Two jobs with the default port on one node, one launcher a task instead of one a node, or "
        "workers of an earlier "
        "attempt that still live.",
        fix=("Take the port from the job id; start one launcher a node.",),
        changes=(env("MASTER_PORT", "$((20000 + SLURM_JOB_ID % 20000))"),),
        outranks=5,
    ),
)
