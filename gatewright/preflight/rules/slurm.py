"""GW70x to GW72x: the queue and the launcher. Jobs that cannot finish, signals nobody hears, ranks that do not add
up."""

import re

from gatewright.preflight.fault import Fault, Rule, add_after, set_to
from gatewright.preflight.job import Job

LUMI_LIMIT_S = {"standard-g": 48 * 3600, "small-g": 72 * 3600, "dev-g": 3 * 3600}
LUMI_CORES = 56
LUMI_MEMORY = 480 * 2**30
_PORTS = ("29500", "12355", "6000")
"""Ports that every tutorial uses."""


def run_longer_than_its_jobs(job: Job) -> Fault | None:
    """A run that needs more time than its jobs have together ends at a time limit, not at its last step. Its length is
    known as soon as the step time is."""
    steps, limit = job.max_steps.get(0), job.time_limit_s
    if job.step_s is None or steps <= 0 or limit.value is None:
        return None
    links = max(job.links.get(1), _array_length(job))
    need, have = steps * job.step_s, limit.value * links
    if need <= have:
        return None
    jobs = -(-int(need * 1.08) // limit.value)
    return Fault(
        f"{job.max_steps} at {job.step_s:g} s take {need / 3600:.0f} h, and {links} job{'s' if links > 1 else ''} of "
        f"{limit.value / 3600:g} h have {have / 3600:.0f}",
        (limit, job.max_steps),
        f"chain {jobs} jobs, or take fewer steps",
    )


def _array_length(job: Job) -> int:
    match = re.match(r"(\d+)-(\d+)", job.array.get(""))
    return int(match[2]) - int(match[1]) + 1 if match else 1


def log_lost_on_requeue(job: Job) -> Fault | None:
    """A requeued job keeps its id, so it truncates its own log: the error that caused the requeue is gone."""
    if not job.requeue.value or job.open_mode.value == "append":
        return None
    return Fault(
        f"{job.requeue.key} without --open-mode=append: the log of the first life is overwritten",
        (job.requeue,),
        "append, and put the restart count into the log's name",
        add_after(job.requeue, "#SBATCH --open-mode=append"),
    )


def log_shared_by_all_jobs(job: Job) -> Fault | None:
    """A log named without the job id is written over by the next job of the chain."""
    if not job.log.given or re.search(r"%[jAJ]|SLURM_JOB", job.log.get("")) or job.open_mode.value == "append":
        return None
    if job.log.get("").startswith("/dev/"):
        return None
    return Fault(
        f"{job.log}: the next job writes over this log",
        (job.log,),
        "name it %x-%j.out",
        set_to(job.log, re.sub(r"(\.\w+)?$", r"-%j\1", job.log.get("log"), count=1)),
    )


def signal_kills_the_agent(job: Job) -> Fault | None:
    """A signal to the job's steps reaches torchrun's agent, which dies of it; its workers never hear, and 0 of 2 ranks
    saved. Sent to the batch script (B:) it can become a stop file, which works through torchrun and containers."""
    if job.launcher.value != "torchrun" or job.launcher_signals.value or not job.signal.given:
        return None
    if job.signal.get("").startswith("B:") or not re.match(r"(SIG)?USR", job.signal.get("")):
        return None
    return Fault(
        f"{job.signal} goes to torchrun's agent, which dies of it before any rank saves",
        (job.signal, job.launcher),
        "send it to the batch script, with B: in front, and trap it there",
        set_to(job.signal, f"B:{job.signal.value}"),
    )


def signal_without_trap(job: Job) -> Fault | None:
    """A signal to the batch script (B:) that the script does not trap ends the script, and the job with it."""
    match = re.match(r"B:(?:SIG)?([A-Z0-9]+)", job.signal.get(""))
    if match is None or match[1] in job.traps.get(()):
        return None
    return Fault(
        f"{job.signal}, and the script has no trap for {match[1]}: the signal ends it",
        (job.signal,),
        f"trap it: trap 'touch \"$OUTPUT/stop\"' {match[1]}, and run srun in the background with wait",
    )


def signal_too_late(job: Job) -> Fault | None:
    """SLURM looks every 30 s and may be a minute early, never late: between the lead and a minute more remain. The
    current step, an evaluation and the save must fit into the lead itself."""
    match = re.search(r"@(\d+)", job.signal.get(""))
    needed = int(2 * (job.step_s or 0)) + 60
    if match is None or int(match[1]) >= needed:
        return None
    return Fault(
        f"{job.signal} leaves {match[1]} s, and {needed} s are the least for a step and a save",
        (job.signal,),
        "300 s is a start; measure a save and double it",
        set_to(job.signal, re.sub(r"@\d+", f"@{max(300, needed)}", job.signal.get(""))),
    )


def chain_by_afterok(job: Job) -> Fault | None:
    """afterok on a job that SLURM has forgotten runs at once, also when that job failed; on one that hits its time
    limit the chain stops. A job killed for memory inside a script counts as completed."""
    if not job.dependency.get("").startswith("afterok"):
        return None
    return Fault(
        f"{job.dependency}: a time limit breaks the chain, and a forgotten failure does not",
        (job.dependency,),
        "use singleton or afterany, and let the job look for its predecessor's result",
    )


def processes_and_gpus_differ(job: Job) -> Fault | None:
    """One process a GPU: with more, two share a GPU and run out of memory; with fewer, GPUs that are paid for idle."""
    processes, gpus = job.launcher_processes, job.gpus_per_node
    if processes.value is None or gpus.value is None or processes.value == gpus.value or not gpus.given:
        return None
    return Fault(
        f"{processes} and {gpus}: one process a GPU",
        (processes, gpus),
        f"start {gpus.value}",
        set_to(processes, gpus.value),
    )


def nodes_differ(job: Job) -> Fault | None:
    """The launcher waits for nodes that the job does not have, until its time-out, or leaves out some that it has."""
    wanted, have = job.launcher_nodes, job.nodes
    if wanted.value is None or have.value is None or wanted.value == have.value or not have.given:
        return None
    return Fault(
        f"{wanted} and {have}: the rendezvous waits for nodes that do not come"
        if wanted.value > have.value
        else f"{wanted} and {have}: {have.value - wanted.value} of the job's nodes stay idle",
        (wanted, have),
        f"start {have.value}",
        set_to(wanted, have.value),
    )


def ranks_differ(job: Job) -> Fault | None:
    """accelerate's num_processes is the number of ranks of all nodes together."""
    if not job.ranks.given or job.gpus_per_node.value is None:
        return None
    have = job.gpus_per_node.value * job.nodes.get(1)
    if job.ranks.value == have:
        return None
    return Fault(
        f"{job.ranks}, and the job has {job.nodes.get(1)} × {job.gpus_per_node.value} = {have} GPUs",
        (job.ranks, job.gpus_per_node),
        f"start {have}: it counts all nodes together",
        set_to(job.ranks, have),
    )


def one_launcher_a_task(job: Job) -> Fault | None:
    """srun starts one torchrun for each task; with a task a GPU, eight launchers on a node fight for one port and start
    64 processes."""
    if job.launcher.value not in ("torchrun", "accelerate", "deepspeed") or not job.launcher_srun.value:
        return None
    if job.tasks_per_node.get(1) <= 1:
        return None
    return Fault(
        f"{job.tasks_per_node}: srun starts {job.tasks_per_node.value} × {job.launcher.value} on every node",
        (job.tasks_per_node, job.launcher),
        "one task a node for a launcher, or one a GPU without it",
        set_to(job.tasks_per_node, 1),
    )


def launcher_on_one_node(job: Job) -> Fault | None:
    """The batch script runs on the first node only: without srun the other nodes never start a process, and the first
    waits for them."""
    if job.nodes.get(1) < 2 or job.launcher.value not in ("torchrun", "accelerate") or job.launcher_srun.value:
        return None
    return Fault(
        f"{job.nodes}, and {job.launcher.value} is started without srun: only the first node runs it",
        (job.launcher, job.nodes),
        f"write srun {job.launcher.value} …",
    )


def no_rendezvous(job: Job) -> Fault | None:
    """Without an address to meet at, every node's torchrun makes a world of its own and trains the same run."""
    if job.launcher.value != "torchrun" or job.nodes.get(1) < 2:
        return None
    if job.launcher_rendezvous.get("standalone") != "standalone" or job.env.keys() & {
        "PET_RDZV_ENDPOINT",
        "PET_MASTER_ADDR",
    }:
        return None
    return Fault(
        f"{job.nodes}, and torchrun has no --rdzv_endpoint: every node trains alone",
        (job.launcher, job.nodes),
        'add --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint="$(scontrol show hostnames | head -1):29400"',
    )


def port_everyone_uses(job: Job) -> Fault | None:
    """Two jobs on one node with the default port: the second one ends with EADDRINUSE, or joins the first one's
    ranks."""
    env = job.env.get("MASTER_PORT")
    said = job.launcher_port if job.launcher_port.given else env
    if said is None or said.value not in _PORTS:
        return None
    return Fault(
        f"{said}: another job on this node may use it too",
        (said,),
        "take it from the job id: $((20000 + SLURM_JOB_ID % 20000))",
        set_to(said, "$((20000 + SLURM_JOB_ID % 20000))") if said is env else None,
    )


def array_runs_at_once(job: Job) -> Fault | None:
    """A job array without a limit starts all its jobs together: they write into one folder at the same time."""
    if not re.match(r"\d+-\d+$", job.array.get("")) or not job.output_dir.given:
        return None
    if re.search(r"ARRAY_TASK", job.output_dir.get("")):
        return None
    return Fault(
        f"{job.array}: {_array_length(job)} jobs at once, all writing to {job.output_dir.value}",
        (job.array, job.output_dir),
        "add %1 to run them one after another",
        set_to(job.array, f"{job.array.value}%1"),
    )


def failure_looks_like_success(job: Job) -> Fault | None:
    """A step that is killed inside a script that goes on leaves the job COMPLETED, and a dependency on success runs."""
    if not job.slurm.value or job.stops_on_error.value or not job.dependency.value:
        return None
    return Fault(
        "the script goes on after a failed command, so a failed job may count as completed",
        (job.dependency,),
        "write set -euo pipefail below the #SBATCH lines",
    )


def gpus_not_requested(job: Job) -> Fault | None:
    """Without --gpus-per-node or --gres a job on a GPU partition sees no GPU, or all of somebody else's."""
    if not job.slurm.value or job.gpus_per_node.value is not None or job.asks_gpus.value:
        return None
    if not job.launcher_processes.get(1) > 1:
        return None
    return Fault(
        f"{job.launcher_processes}, and no #SBATCH line asks for GPUs",
        (job.launcher_processes,),
        f"add #SBATCH --gpus-per-node={job.launcher_processes.value}",
    )


def time_beyond_the_partition(job: Job) -> Fault | None:
    """sbatch refuses the job, or it waits for ever."""
    limit = LUMI_LIMIT_S.get(job.partition.get(""))
    if limit is None or job.time_limit_s.get(0) <= limit:
        return None
    return Fault(
        f"{job.time_limit_s.key} {job.time_limit_s.get(0) / 3600:g} h, {job.partition.value} allows {limit // 3600}",
        (job.time_limit_s, job.partition),
        f"chain jobs of {limit // 3600} h",
        set_to(job.time_limit_s, f"{limit // 3600}:00:00"),
    )


def more_cores_than_lumi_has(job: Job) -> Fault | None:
    """A LUMI-G node has 56 cores for jobs, seven for each GCD; one of each group of eight is the system's."""
    cores = job.cpus_per_task.get(0) * job.tasks_per_node.get(1)
    if not job.lumi or cores <= LUMI_CORES:
        return None
    each = LUMI_CORES // job.tasks_per_node.get(1)
    return Fault(
        f"{job.cpus_per_task} × {job.tasks_per_node.get(1)} tasks = {cores} cores of {LUMI_CORES}",
        (job.cpus_per_task,),
        f"ask for {each}",
        set_to(job.cpus_per_task, each),
    )


def more_memory_than_lumi_has(job: Job) -> Fault | None:
    """A LUMI-G node has 512 GiB, of which 480 can be asked for."""
    if not job.lumi or job.memory_bytes.get(0) <= LUMI_MEMORY:
        return None
    return Fault(
        f"{job.memory_bytes.key} {job.memory_bytes.get(0) / 2**30:.0f} GiB of 480",
        (job.memory_bytes,),
        "ask for 480G, or 60G a GPU",
        set_to(job.memory_bytes, "480G"),
    )


def cores_far_from_their_gpu(job: Job) -> Fault | None:
    """On LUMI-G each GCD hangs on cores of its own, and not in order: without a mask ranks run on cores at the other
    end of the node."""
    if not job.lumi or job.tasks_per_node.get(1) != 8 or job.cpu_bind.given:
        return None
    return Fault(
        f"{job.tasks_per_node} without --cpu-bind: ranks land on cores far from their GCD",
        (job.tasks_per_node,),
        "srun --cpu-bind=mask_cpu:0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
        "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000",
    )


def one_core_a_task(job: Job) -> Fault | None:
    """SLURM gives a task one core, unless the job or the site says otherwise. A rank, its data workers and the threads
    of its network share it; behind one launcher a node, all ranks of the node do."""
    gpus = job.gpus_per_node.get(0)
    if not job.slurm.value or not gpus or job.cpus_per_task.given or job.asks_cores.value:
        return None
    if job.partition.get("") == "standard-g":  # whole nodes only
        return None
    return Fault(
        f"{gpus} GPUs a node and no --cpus-per-task: one core a task, unless the site has a default for each GPU",
        (job.gpus_per_node,),
        "say --cpus-per-task in #SBATCH and in srun, or take the node with --exclusive",
    )


_LAB = "measured on SLURM 22.05.8"
_LUMI = "LUMI AI guide and LUMI-G documentation, September 2026"
RULES = (
    Rule("GW701", "error", run_longer_than_its_jobs, "AMDResearch/hpcfund#16; a campaign of 6,060 steps at 125 s"),
    Rule("GW702", "warning", log_lost_on_requeue, _LAB, safe=True),
    Rule("GW703", "warning", log_shared_by_all_jobs, _LAB),
    Rule("GW704", "error", signal_kills_the_agent, f"{_LAB}, torchrun under proctrack/cgroup; swiss-ai/Megatron-LM#3"),
    Rule("GW705", "error", signal_without_trap, f"{_LAB}; bash(1), trap"),
    Rule("GW706", "warning", signal_too_late, f"{_LAB}; goodfire-ai/spd#677"),
    Rule("GW707", "warning", chain_by_afterok, _LAB),
    Rule("GW708", "error", processes_and_gpus_differ, "torchrun docs, --nproc-per-node"),
    Rule("GW709", "error", nodes_differ, "torchrun docs, --nnodes"),
    Rule("GW710", "error", ranks_differ, "accelerate docs, num_processes"),
    Rule("GW711", "error", one_launcher_a_task, "EleutherAI/gpt-neox#768"),
    Rule("GW712", "error", launcher_on_one_node, "SLURM docs: the batch script runs on the first node"),
    Rule("GW713", "error", no_rendezvous, "torchrun docs, multi-node"),
    Rule("GW714", "warning", port_everyone_uses, "modelscope/ms-swift#3988"),
    Rule("GW715", "error", array_runs_at_once, "stas00/ml-engineering, --array=1-10%1", safe=True),
    Rule("GW716", "note", failure_looks_like_success, _LAB),
    Rule("GW717", "warning", gpus_not_requested, "SLURM docs, generic resources"),
    Rule("GW718", "error", time_beyond_the_partition, _LUMI),
    Rule("GW719", "error", more_cores_than_lumi_has, _LUMI, safe=True),
    Rule("GW720", "error", more_memory_than_lumi_has, _LUMI, safe=True),
    Rule("GW721", "note", cores_far_from_their_gpu, _LUMI),
    Rule("GW722", "warning", one_core_a_task, "SLURM docs, sbatch --cpus-per-task: one processor a task by default"),
)
