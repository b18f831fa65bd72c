"""Campaign files: what a person writes of stages that depend on each other; read by gatewright/campaign/read.py."""

from typing import Annotated

from pydantic import Field, model_validator

from gatewright.spec.run import Cluster, PositiveInt, Section


class StageFile(Section):
    """A stage of a campaign file: a run, or a command."""

    run: str | None = None
    """Run file that this stage trains."""
    command: str | None = None
    """Shell command of this stage. Exit code 0: done; 85: saved, start it again; 3: it cannot finish; else: failed."""
    needs: list[str] = Field(default=[])
    """Stages that must be done before."""
    folder: str | None = None
    """Folder of a command that keeps checkpoints/step-N/manifest.json, so that its progress can be seen."""
    inputs: list[str] = Field(default=[])
    """Files and folders that the stage reads; it runs again when one of them changes."""
    outputs: list[str] = Field(default=[])
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
