"""Campaign: stages that depend on each other, each a chain of jobs, and the record that every start of a job leaves."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gatewright.spec.run import Cluster, PositiveInt, Section

Outcome = Literal["done", "saved", "hopeless", "failed", "fault", "killed", "left"]
"""How a start of a job ended. saved: stopped in time, the next link goes on. hopeless: the gate said no. fault: a node
or GPU failed. killed: it never wrote an end. left: there was nothing to do."""

DONE, FAILED, HOPELESS, NO_PROGRESS, SAVED = 0, 1, 3, 4, 85
"""Exit codes of a link, and what a stage's command may say: 0 done, 3 cannot finish in its time, 85 saved, go on."""


# --- what a person writes -----------------------------------------------------------------------------------------


class StageFile(Section):
    """A stage of a campaign file: a run, or a command."""

    run: str | None = None
    """Run file that this stage trains."""
    command: str | None = None
    """Shell command of this stage. Exit code 0: done; 85: saved, start it again; 3: it cannot finish; else: failed."""
    needs: list[str] = []
    """Stages that must be done before."""
    folder: str | None = None
    """Folder of a command that keeps checkpoints/step-N/manifest.json, so that its progress can be seen."""
    inputs: list[str] = []
    """Files and folders that the stage reads; it runs again when one of them changes."""
    outputs: list[str] = []
    """Files and folders that must be there when it is done."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a command, on one node; 0: it goes to cluster.cpu_partition."""
    cpus: PositiveInt = 4
    """CPUs of a command."""
    memory_gib: PositiveInt | None = None
    """Memory of a command. Default: from `model`, otherwise the partition's."""
    model: str | None = None
    """Model folder, or name in the catalogue, that the command holds in memory: 2.2 × its bytes and 16 GiB are asked
    for, room for the model, its merged copy and the files being written."""
    time_limit: Annotated[str, Field(pattern=r"^\d+(s|m|h|d)$", examples=["90m", "24h"])] | None = None
    """Time limit of one job; default: the cluster's."""
    links: PositiveInt | None = None
    """Jobs in the chain at most; default: 1 for a command, the run's cluster.links for a run."""

    @model_validator(mode="after")
    def _run_or_command(self) -> "StageFile":
        if (self.run is None) == (self.command is None):
            raise ValueError("give either run or command")
        return self


class CampaignFile(Section):
    """A campaign file."""

    campaign: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", examples=["judge"])]
    """Name of the campaign, and of its folder."""
    cluster: Cluster = Cluster()
    """The queue, for stages that are commands; a run brings its own, and takes this one where it has none."""
    stages: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")], StageFile], Field(min_length=1)
    ]
    """The stages by name."""
    runs_dir: str = "runs"
    """Folder of all runs."""


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
    fingerprint: str
    """sha256 over configuration and inputs, without those of the stages before it."""
    folder: str | None
    """Where its checkpoints and events lie."""
    run_file: str | None
    """The resolved run file, in the jobs folder."""
    outputs: tuple[str, ...] = ()
    signal_lead_s: int = 120
    """Seconds before the time limit at which the queue sends its signal."""


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
