"""How a stage is started inside its job: the environment and the command line, as shell text. Pure functions."""

import shlex
from dataclasses import dataclass

from gatewright.campaign.presets import Preset, Variable
from gatewright.spec.campaign import Resources
from gatewright.spec.run import Cluster, Container

SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=300")
"""A rank that ends does not kill the others in the middle of their last save; one that died ends the step after a
while, rather than never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a job script does after the #SBATCH lines."""

    python: str
    """Interpreter that runs the link, on the host."""
    setup: tuple[str, ...] = ()
    """Shell lines."""
    env: tuple[Variable, ...] = ()
    launcher: tuple[str, ...] = ()
    """srun and its options, each word as the shell reads it; empty without a queue."""
    command: tuple[str, ...] = ()
    """What runs in each task."""
    work: str = ""
    """The same without its launcher, in words a person recognises."""


def training(
    run_file: str,
    *,
    cluster: Cluster,
    preset: Preset,
    resources: Resources,
    python: str,
    queue: str,
    lead_s: int,
    work: str,
    binds: tuple[str, ...] = (),
) -> Launch:
    """One process a GPU, by srun or torchrun; a single process needs neither torchrun nor an address to meet at.

    `work`: the run's name, for people. `binds`: folders outside of the working directory that a container must see.
    Without a queue there is no container.
    """
    interpreter = _interpreter(cluster, python)
    ranks = resources.nodes * max(1, resources.gpus_per_node)
    train = ("-m", "gatewright", "train", shlex.quote(run_file))
    launcher = preset.launcher if cluster.launcher == "auto" else cluster.launcher
    meet: tuple[Variable, ...] = ()
    if ranks == 1:
        inner: tuple[str, ...] = (interpreter, *train)
    elif launcher == "torchrun" or queue == "local":
        inner = (interpreter, *_torchrun(resources, queue=queue, lead_s=lead_s), *train)
    else:
        inner = (interpreter, *train)
    if ranks > 1 and queue == "slurm":
        meet = _meeting_point()
    return Launch(
        python=python,
        setup=tuple(cluster.setup),
        env=(*meet, *_environment(cluster, preset, gpus=resources.gpus if queue == "slurm" else 0)),
        launcher=_srun(cluster, preset, resources, launcher=launcher, ranks=ranks, binds=binds)
        if queue == "slurm"
        else (),
        command=_inside(cluster, preset, inner, binds=binds) if queue == "slurm" else inner,
        work=f"gatewright train {work}",
    )


def command(
    text: str, *, file: str, cluster: Cluster, preset: Preset, resources: Resources, python: str, queue: str
) -> Launch:
    """A command of the user's, in a job step of its own, so that what it breaks does not take the link along."""
    step = ("srun", "--ntasks=1", *_cpus(resources)) if queue == "slurm" else ()
    return Launch(
        python=python,
        setup=tuple(cluster.setup),
        env=_environment(cluster, preset, gpus=resources.gpus if queue == "slurm" else 0),
        launcher=step,
        command=("bash", shlex.quote(file)),
        work=text,
    )


def _interpreter(cluster: Cluster, python: str) -> str:
    if cluster.container is not None:
        return shlex.quote(cluster.container.python)
    return shlex.quote(f"{cluster.venv.rstrip('/')}/bin/python" if cluster.venv else python)


def _torchrun(resources: Resources, *, queue: str, lead_s: int) -> tuple[str, ...]:
    """torchrun dies of a USR1 it was not told of, and its workers never hear of it; told, it hands it on and waits."""
    where: tuple[str, ...] = ("--standalone",)
    if queue == "slurm":
        where = (
            f"--nnodes={resources.nodes}",
            "--rdzv-backend=c10d",
            '--rdzv-id="$SLURM_JOB_ID"',
            '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
        )
    return (
        *("-m", "torch.distributed.run", *where),
        f"--nproc-per-node={resources.gpus_per_node}",
        "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
        f"--shutdown-timeout={lead_s}",
    )


def _srun(
    cluster: Cluster, preset: Preset, resources: Resources, *, launcher: str, ranks: int, binds: tuple[str, ...]
) -> tuple[str, ...]:
    """One task a GPU, or one a node for torchrun. Since 22.05 srun no longer takes --cpus-per-task from the job."""
    if ranks > 1 and launcher == "torchrun":
        words: tuple[str, ...] = (*SRUN, "--ntasks-per-node=1", *_cpus(resources))
    else:
        words = (*SRUN, f"--ntasks-per-node={resources.tasks_per_node}", *_cpus(resources))
        if preset.cpu_bind is not None and resources.tasks_per_node == preset.per_node:
            words = (*words, f"--cpu-bind={preset.cpu_bind}")
    if cluster.container is not None and cluster.container.kind == "pyxis":
        words = (
            *words,
            f"--container-image={shlex.quote(cluster.container.image)}",
            *_pyxis_mounts(cluster.container, binds),
        )
    return words


def _cpus(resources: Resources) -> tuple[str, ...]:
    return (f"--cpus-per-task={resources.cpus_per_task}",) if resources.cpus_per_task else ()


def _pyxis_mounts(container: Container, binds: tuple[str, ...]) -> tuple[str, ...]:
    mounts = ",".join(("$PWD:$PWD", *(f"{folder}:{folder}" for folder in binds), *container.binds))
    return (f'--container-mounts="{mounts}"', '--container-workdir="$PWD"')


def _inside(cluster: Cluster, preset: Preset, inner: tuple[str, ...], *, binds: tuple[str, ...]) -> tuple[str, ...]:
    container = cluster.container
    if container is None or container.kind == "pyxis":
        return inner
    bound = ",".join(("$PWD", *binds, *preset.binds, *container.binds))
    gpus = (preset.container_option,) if preset.container_option else ()
    return (container.kind, "exec", *gpus, f'--bind="{bound}"', shlex.quote(container.image), *inner)


def _meeting_point() -> tuple[Variable, ...]:
    host = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    return (
        Variable(name="MASTER_ADDR", value=host, why="ranks meet at the job's first node"),
        Variable(name="MASTER_PORT", value="$((20000 + SLURM_JOB_ID % 20000))", why="another job may use a fixed one"),
    )


def _environment(cluster: Cluster, preset: Preset, *, gpus: int) -> tuple[Variable, ...]:
    """The preset's variables, which are about GPUs, and the user's over them."""
    mine = {text.partition("=")[0]: text.partition("=")[2] for text in cluster.env}
    kept = [one for one in preset.env if one.name not in mine] if gpus else []
    return (*kept, *(Variable(name=name, value=value, why="") for name, value in mine.items()))
