"""Campaign: stages that depend on each other, each a chain of jobs, and the record that every start of a job leaves."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["done", "saved", "hopeless", "failed", "crashed", "fault", "killed", "left"]
"""How a start of a job ended. saved: stopped in time, the next link goes on. hopeless: the gate said no. failed: a
retry cannot cure it. crashed: for a reason without a name; it is tried again. fault: a node or GPU failed. killed: from
outside, before it could save. left: there was nothing to do."""

DONE, FAILED, HOPELESS, NO_PROGRESS, SAVED = 0, 1, 3, 4, 85
"""Exit codes of a link, and what a stage's command may say: 0 done, 3 cannot finish in its time, 85 saved, go on."""


# --- what is submitted --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one job of a stage asks the queue for."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory_mib: int | None = None
    """Of a node; None: the partition's default."""
    time_limit_s: int = 86400
    options: tuple[str, ...] = ()
    """Further options of sbatch."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage as it was submitted; its job script holds the rest."""

    name: str
    job_name: str
    """Name of its jobs in the queue; one chain has one name."""
    needs: tuple[str, ...]
    links: int
    resources: Resources
    usd_per_gpu_hour: float | None
    config: str
    """sha256 over all that a person wrote and that moves its result."""
    folder: str | None
    """Where its checkpoints and events lie; absolute."""
    run_file: str | None
    """Of a stage that our trainer works on: its resolved run file, absolute. Such a stage writes events, and hears
    signals."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    signal_lead_s: int = 120
    """Seconds before the time limit at which the queue sends its signal."""

    @property
    def trains(self) -> bool:
        return self.run_file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What `gatewright submit` wrote down; every link and every login node reads it."""

    name: str
    submission: int
    """Counted from 1: a person who submits again gives every chain a fresh budget of links."""
    time: float
    """Of the submission, Unix seconds."""
    where: str
    """Working directory of all jobs."""
    host: str
    queue: str
    """slurm or local."""
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of a job: written when it begins to work, and again when it ends."""

    stage: str
    job: str
    restart: int
    """How often the queue had started this job before."""
    submission: int
    started: float
    nodes: str
    end_time: float | None = None
    """When the queue will end it."""
    successor: str | None = None
    """Job that it queued to go on after it."""
    checkpoint_before: int | None = None
    """Step of the newest complete checkpoint at its start; None: there was none."""
    ended: float | None = None
    outcome: Outcome | None = None
    reason: str = ""
    exit_code: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    checkpoint_after: int | None = None
    faulty_nodes: tuple[str, ...] = ()
    """Nodes that the chain avoids from now on."""
    notes: tuple[str, ...] = field(default=())
    """What went on besides: clocks that differ, a queue that did not answer."""

    @property
    def key(self) -> str:
        return f"{self.job}_{self.restart}"

    @property
    def progressed(self) -> bool:
        """Whether it left a newer checkpoint than it found."""
        return (self.checkpoint_after or 0) > (self.checkpoint_before or 0)


# --- to and from JSON ---------------------------------------------------------------------------------------------


def campaign_to_json(campaign: Campaign) -> dict[str, Any]:
    return asdict(campaign)


def campaign_from_json(value: dict[str, Any]) -> Campaign:
    """Raises KeyError or TypeError where it is not a campaign."""
    stages = tuple(
        Stage(
            **_known(Stage, stage)
            | {
                "needs": tuple(stage["needs"]),
                "inputs": tuple(stage["inputs"]),
                "outputs": tuple(stage["outputs"]),
                "resources": Resources(
                    **_known(Resources, stage["resources"]) | {"options": tuple(stage["resources"]["options"])}
                ),
            }
        )
        for stage in value["stages"]
    )
    return Campaign(**_known(Campaign, value) | {"stages": stages})


def life_from_json(value: dict[str, Any]) -> Life:
    """Raises KeyError or TypeError where it is not a life."""
    lists = {name: tuple(value.get(name, ())) for name in ("faulty_nodes", "notes")}
    return Life(**_known(Life, value) | lists)


def _known(cls: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Fields of a newer version are passed over."""
    names = {one.name for one in fields(cls)}
    return {name: item for name, item in value.items() if name in names}


def seconds_of(time_limit: str) -> int:
    """90s, 90m, 24h or 2d, in seconds."""
    return int(time_limit[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[time_limit[-1]]


def jobs_folder(run_folder: Path) -> Path:
    """Where a campaign keeps what belongs to the queue."""
    return run_folder / "jobs"
