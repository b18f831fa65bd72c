"""SLURM: limits, preemption, lost nodes, refused jobs, and which task failed first."""

from gatewright.doctor.cause import Cause, Log, Role, Seen, plain_finding, sbatch, sign
from gatewright.doctor.knobs import knobs
from gatewright.spec.finding import Finding

_CANCELLED = r"\*\*\* (?:JOB|STEP) (?P<job>[\d._\w]+) ON (?P<node>\S+) CANCELLED AT \S+ DUE TO "


def time_limit(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """The time limit, with the setting that keeps the work of the next job."""
    return plain_finding(cause, seen, log, changes=(*cause.changes, *knobs(log.tool, "save_more_often")))


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW525",
        name="time-limit",
        kind="time_limit",
        title="The job's time limit",
        confidence="certain",
        signs=(
            sign("DUE TO TIME LIMIT", pattern=_CANCELLED + "TIME LIMIT|DUE TO TIME LIMIT"),
            sign("JOB TIMEOUT", "TimeLimit", pattern=r"State=TIMEOUT|Reason=TimeLimit|JOB TIMEOUT"),
            sign("TIMEOUT", pattern=r"(?:JobState=|State:? ?|\s)TIMEOUT(?:\s|$)(?!.*NCCL)"),
            sign(
                "time limit",
                pattern=r"(?:exceeded|reached|hit) (?:the |its )?(?:job |wall ?)?time limit|walltime .*exceeded limit",
            ),
            sign("walltime", pattern=r"[Ww]alltime .*exceeded|exceeded .*[Ww]alltime|killed: walltime"),
        ),
        text="The job reached its time limit and SLURM cancelled it.",
        why="Not a failure of the program, if it saved in time: whatever came after the last checkpoint is lost.",
        fix=(
            "Chain jobs that resume, and ask for a warning before the end so that the run can save.",
            "Save often enough that one job writes several checkpoints.",
        ),
        changes=(sbatch("--signal", "B:USR1@600"), sbatch("--dependency", "singleton")),
        judge=time_limit,
        outranks=6,
    ),
    Cause(
        code="GW526",
        name="preempted",
        kind="preempted",
        title="Preempted by another job",
        confidence="certain",
        signs=(
            sign("PREEMPT", pattern=r"DUE TO PREEMPTION|(?:JobState=|State=|\s)PREEMPTED\b|JOB PREEMPTED"),
            sign("preempted", pattern=r"[Jj]ob .*\bpreempted\b|spot instance.*preempted|being preempted"),
        ),
        text="The job was preempted by one of higher priority.",
        why="Not a failure of the program; the next job resumes.",
        fix=("Requeue and resume from the last complete checkpoint.",),
        changes=(sbatch("--requeue", ""), sbatch("--open-mode", "append")),
        outranks=6,
    ),
    Cause(
        code="GW527",
        name="node-failed",
        kind="node_fail",
        title="A node failed",
        confidence="certain",
        signs=(
            sign(
                "NODE FAIL",
                "NODE_FAIL",
                "DUE TO NODE",
                pattern=r"DUE TO NODE FAIL(?:URE)?|(?:JobState=|State=|\s)NODE_FAIL\b",
            ),
            sign(
                "Node failure",
                pattern=r"(?:srun|slurm\w*): error: Node failure on (?P<node>\S+)|Node failure on (?P<where>\S+)",
            ),
            sign(
                "node failure",
                "Zero Bytes were transmitted",
                "Socket timed out on send/recv",
                pattern=r"due to node failure|Zero Bytes were transmitted",
            ),
        ),
        text="SLURM lost a node of the job.",
        why="SLURM requeues such a job by itself, under the same id; without --open-mode=append the log of "
        "its first life is "
        "overwritten.",
        fix=("Let it run again without that node.",),
        changes=(sbatch("--exclude", "the node that failed"), sbatch("--open-mode", "append")),
        outranks=6,
    ),
    Cause(
        code="GW528",
        name="requeued",
        kind="requeued",
        title="The job was requeued",
        role=Role.GENERIC,
        severity="note",
        confidence="certain",
        signs=(sign("JOB REQUEUE", "Requeued", pattern=r"DUE TO JOB REQUEUE|JOB REQUEUE|\bRequeued\b"),),
        text="The job was requeued: this life of it ends here and the same id starts again.",
        why="By a signal handler, an administrator, or the loss of a node.",
        fix=("Check that the next life resumes instead of starting at step 0.",),
        changes=(sbatch("--open-mode", "append"),),
        outranks=6,
    ),
    Cause(
        code="GW529",
        name="dependency-never-satisfied",
        kind="dependency_never",
        title="A dependency that can never be met",
        confidence="certain",
        signs=(sign("DependencyNeverSatisfied", "Job dependency problem"),),
        text="The job depends on one that failed, so it never runs.",
        why="afterok waits for success. On a failed predecessor the dependent job is cancelled, or waits for "
        "ever; and an id "
        "that the controller has forgotten counts as success.",
        fix=("Chain with afterany or singleton, and let each job check the result of its predecessor itself.",),
        changes=(sbatch("--dependency", "singleton", was="afterok:…"),),
        outranks=6,
    ),
    Cause(
        code="GW530",
        name="submit-rejected",
        kind="submit_rejected",
        title="SLURM refused the job",
        confidence="certain",
        signs=(
            sign(
                "Batch job submission failed",
                "Unable to allocate resources",
                pattern=r"(?:Batch job submission failed|Unable to allocate resources): (?P<reason>.+)",
            ),
            sign(
                "sbatch: error",
                "salloc: error",
                "srun: error: Unable to",
                "srun: error: Invalid",
                pattern=(
                    r"(?:(?:sbatch|salloc): error: |"
                    r"srun: error: (?=Unable to (?:create|allocate)(?!.*already completing)|"
                    r"Invalid (?:account|partition|qos|generic resource|feature|time limit|numeric value|wckey)))"
                    r"(?P<reason>.+)"
                ),
            ),
            sign(
                "AssocGrp",
                "QOSMax",
                "PartitionTimeLimit",
                "BadConstraints",
                pattern=r"Reason=(?:AssocGrp\w+|QOSMax\w+|PartitionTimeLimit|BadConstraints)",
            ),
        ),
        text="SLURM refused the job: {reason}.",
        why="What was asked does not exist in that partition, or exceeds a limit of the account.",
        fix=("Compare the request with `sinfo -o '%P %l %D %c %m %G'` and the limits of the account.",),
        outranks=5,
    ),
    Cause(
        code="GW531",
        name="cancelled",
        kind="cancelled",
        title="Cancelled",
        role=Role.CASCADE,
        severity="warning",
        confidence="likely",
        signs=(
            sign(
                "CANCELLED AT",
                pattern=r"\*\*\* (?:JOB|STEP) [\w.]+ ON \S+ CANCELLED AT \S+(?! DUE TO)\s*(?:\*\*\*)?\s*$",
            ),
            sign(
                "CANCELLED by",
                "Job step aborted",
                "Force Terminated",
                "Job allocation",
                pattern=r"CANCELLED by|Job step aborted|Force Terminated|Job allocation \d+ has been revoked",
            ),
        ),
        text="The job or step was cancelled, by a person (scancel) or by srun after a task failed.",
        why="Without `DUE TO` it is scancel, or srun's --kill-on-bad-exit after the first task that failed.",
        fix=("Look for the first task that failed; if there is none, somebody cancelled the job.",),
    ),
    Cause(
        code="GW532",
        name="stuck-in-kernel",
        kind="node_fail",
        title="A process that does not die",
        confidence="likely",
        signs=(sign("JOB NOT ENDING WITH SIGNALS", "STEPD TERMINATED", "Kill task failed", "UnkillableStep"),),
        text="A process did not die when it was killed: it hangs in the kernel, on a file system or a GPU driver.",
        why="SLURM drains the node afterwards. The usual reasons are a hung Lustre mount and a lost GPU.",
        fix=("Report the node and run without it.",),
        changes=(sbatch("--exclude", "that node"),),
        outranks=6,
    ),
    Cause(
        code="GW533",
        name="task-failed-first",
        kind="rank_failed",
        title="A task failed first",
        role=Role.GENERIC,
        confidence="certain",
        signs=(
            sign(
                "Exited with exit code",
                pattern=(
                    r"srun: error: (?P<node>\S+): tasks? (?P<task>[\d,-]+): Exited with exit code "
                    r"(?P<exit_code>(?!137\b)\d+)"
                ),
            ),
            sign(
                "Aborted",
                "Segmentation fault",
                pattern=r"srun: error: (?P<node>\S+): tasks? (?P<task>[\d,-]+): (?P<signal>Aborted|Segmentation fault)",
            ),
        ),
        text="Task {task} on {node} failed first; what other tasks report follows from it.",
        why="srun names the first task that ended badly and then kills the others (--kill-on-bad-exit).",
        fix=("Read the log of that task; here nothing says why it failed.",),
        outranks=1,
    ),
    Cause(
        code="GW534",
        name="signal-not-delivered",
        kind="signal_not_delivered",
        title="The warning signal killed the launcher",
        confidence="likely",
        signs=(
            sign("User defined signal", pattern=r"User defined signal [12]"),
            sign(
                "SIGUSR",
                pattern=(
                    r"Received Signals\.SIGUSR[12]|Received 1[02] death signal|got signal:? (?:10|12)\b.*SIGUSR|died "
                    r"with <Signals\.SIGUSR"
                ),
            ),
        ),
        text="A warning signal (USR1 or USR2) ended the launcher instead of reaching the workers: nothing was saved.",
        why=(
            "torchrun handles only TERM and INT by default: USR1 kills the agent, and with cgroups the "
            "workers never see it."
        ),
        fix=(
            "Send the signal to the batch script (B:USR1@600) and let it write a stop file or forward TERM.",
            "Or start torchrun with --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout 60.",
        ),
        changes=(sbatch("--signal", "B:USR1@600"),),
        outranks=3,
    ),
)
