"""From what a person asked to stages: resources, launch, and the text of every job script. Pure but for its look at
files that a stage names."""

import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gatewright.campaign import launch
from gatewright.campaign.fingerprint import config_hash
from gatewright.campaign.folder import JobsFolder
from gatewright.campaign.presets import Preset, find_preset
from gatewright.campaign.read import TRAIN, Asked
from gatewright.campaign.sbatch import job_script
from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.spec.campaign import Campaign, Resources, Stage, jobs_folder, seconds_of
from gatewright.spec.campaign_file import StageFile
from gatewright.spec.errors import GatewrightError, RunFileError
from gatewright.spec.read import dump_run
from gatewright.spec.run import Cluster, Run
from gatewright.spec.same_run import what_matters

MODEL_TIMES, MODEL_ROOM_GIB = 2.2, 16
"""A stage that holds a model has room for it, for the copy it makes, and for the files being written."""
LEAST_LEAD_S, USUAL_LEAD_S = 1, 120
COMMAND_FILE = """\
trap : TERM  # the command hears it too, and may save
(
trap 'exit $?' TERM
{command}
)
code=$?
# srun also returns 0 when the node failed under it, so the command says itself how it ended
echo $code > "$GATEWRIGHT_EXIT_FILE"
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A campaign ready to be written down: each stage with its script and, of a run, its resolved run file."""

    campaign: Campaign
    jobs: JobsFolder
    scripts: dict[str, str]
    run_files: dict[str, str]
    commands: dict[str, str]
    """Of other stages the command, as a script that says how it ended."""
    works: dict[str, str]
    """What each stage does, in words."""


def build(asked: Asked, *, queue: str, submission: int, saves_s: dict[str, float] | None = None) -> Built:
    """`saves_s`: the longest save of each run so far, where one was measured. Raises RunFileError."""
    where = Path.cwd()
    jobs = JobsFolder(jobs_folder(where / asked.folder))
    stages, launches, run_files, commands, machines = [], {}, {}, {}, {}
    for name, written in asked.stages.items():
        run = asked.runs.get(name)
        cluster = (run.cluster if run is not None and run.cluster is not None else asked.cluster) or Cluster()
        preset = machines[name] = find_preset(cluster.machine)
        stage = _stage(asked, name, written, run, cluster, preset, jobs, where, saves_s or {})
        stages.append(stage)
        if run is not None:
            run_files[name] = dump_run(run)
        if written.command is not None:
            commands[name] = COMMAND_FILE.format(command=written.command)
        launches[name] = _launch(
            stage,
            written,
            cluster,
            preset,
            queue=queue,
            command_file=jobs.stage(name).command,
            binds=_outside(run, where),
        )
    campaign = Campaign(
        name=asked.name,
        submission=submission,
        time=time.time(),
        where=str(where),
        host=socket.gethostname(),
        queue=queue,
        stages=tuple(stages),
    )
    scripts = {
        stage.name: job_script(
            campaign,
            stage,
            launches[stage.name],
            folder=str(jobs.path / stage.name),
            preset=machines[stage.name],
        )
        for stage in stages
    }
    works = {name: one.work for name, one in launches.items()}
    return Built(campaign=campaign, jobs=jobs, scripts=scripts, run_files=run_files, commands=commands, works=works)


def _stage(
    asked: Asked,
    name: str,
    written: StageFile,
    run: Run | None,
    cluster: Cluster,
    preset: Preset,
    jobs: JobsFolder,
    where: Path,
    saves_s: dict[str, float],
) -> Stage:
    limit_s = seconds_of(written.time_limit or cluster.time_limit)
    want = _of_run(run, cluster, preset, limit_s) if run is not None else _of_command(written, cluster, preset, limit_s)
    folder = run.folder if run is not None else written.folder
    config = what_matters(run) if run is not None else {"command": written.command, "folder": written.folder}
    return Stage(
        name=name,
        job_name=asked.name if asked.stages.keys() == {TRAIN} else f"{asked.name}.{name}",
        needs=tuple(written.needs),
        links=written.links or (cluster.links if run is not None else 1),
        resources=want,
        usd_per_gpu_hour=_price(cluster, run, preset),
        config=config_hash(config),
        folder=None if folder is None else str(where / folder),
        run_file=None if run is None else str(jobs.stage(name).run_file),
        inputs=(*(_inputs(run) if run is not None else ()), *written.inputs),
        outputs=tuple(written.outputs),
        signal_lead_s=signal_lead_s(limit_s, save_s=saves_s.get(name)),
    )


def _launch(
    stage: Stage,
    written: StageFile,
    cluster: Cluster,
    preset: Preset,
    *,
    queue: str,
    command_file: Path,
    binds: tuple[str, ...],
) -> launch.Launch:
    if stage.run_file is None:
        return launch.command(
            written.command or "",
            file=str(command_file),
            cluster=cluster,
            preset=preset,
            resources=stage.resources,
            python=sys.executable,
            queue=queue,
        )
    return launch.training(
        stage.run_file,
        cluster=cluster,
        preset=preset,
        resources=stage.resources,
        python=sys.executable,
        queue=queue,
        lead_s=stage.signal_lead_s,
        work=Path(stage.folder or "").name,
        binds=binds,
    )


def _outside(run: Run | None, where: Path) -> tuple[str, ...]:
    """Folders that a run names by absolute paths outside of the working directory: a container must see them too."""
    if run is None:
        return ()
    named = [run.model.path, run.data.train, run.runs_dir, run.data.chat_template or ""]
    named += [run.evaluate.data] if run.evaluate else []
    paths = [Path(name) for name in named if Path(name).is_absolute()]
    folders = [path if path.is_dir() or path == Path(run.runs_dir) else path.parent for path in paths]
    return tuple(dict.fromkeys(str(folder) for folder in folders if not folder.is_relative_to(where)))


def _of_run(run: Run, cluster: Cluster, preset: Preset, limit_s: int) -> Resources:
    """One task a GPU, and one alone where the run file names no hardware."""
    hardware = run.hardware
    gpus = hardware.per_node if hardware is not None else 0
    torchrun = (preset.launcher if cluster.launcher == "auto" else cluster.launcher) == "torchrun"
    each = cluster.cpus_per_gpu or preset.cpus_per_gpu
    tasks = 1 if torchrun else max(1, gpus)
    memory_gib = cluster.memory_gib or (preset.memory_gib if gpus else None)
    whole = preset.per_node if preset.per_node is not None else gpus
    options = tuple(cluster.sbatch)
    if each is None and gpus and gpus == preset.per_node:  # else a task gets one core, and the rest lies idle
        options = tuple(dict.fromkeys(("--exclusive", *(() if memory_gib else ("--mem=0",)), *options)))
    if memory_gib and cluster.memory_gib is None and gpus < whole:
        memory_gib = memory_gib * gpus // whole  # a part of a node gets that part of its memory
    return Resources(
        partition=cluster.partition or preset.partition,
        account=cluster.account,
        qos=cluster.qos,
        nodes=hardware.nodes if hardware is not None else 1,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_task=each * max(1, gpus) // tasks if each else None,
        memory_mib=None if memory_gib is None else memory_gib * 1024,
        time_limit_s=limit_s,
        options=options,
    )


def _of_command(written: StageFile, cluster: Cluster, preset: Preset, limit_s: int) -> Resources:
    gpu_partition = cluster.partition or preset.partition
    cpu_partition = cluster.cpu_partition or preset.cpu_partition or gpu_partition
    memory_gib = written.memory_gib
    if memory_gib is None and written.model is not None:
        memory_gib = round(MODEL_TIMES * model_bytes(written.model) / 2**30) + MODEL_ROOM_GIB
    return Resources(
        partition=gpu_partition if written.gpus else cpu_partition,
        account=cluster.account,
        qos=cluster.qos,
        gpus_per_node=written.gpus,
        cpus_per_task=written.cpus,
        memory_mib=None if memory_gib is None else memory_gib * 1024,
        time_limit_s=limit_s,
        options=tuple(cluster.sbatch),
    )


def model_bytes(model: str) -> int:
    """Bytes of a model's weights in bfloat16: of the folder's safetensors, or by the catalogue. Raises RunFileError."""
    held = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    if held:
        return held
    try:
        return 2 * find_shape(model).parameters
    except GatewrightError as error:
        raise RunFileError(f"model {model}: no folder with safetensors, and {error}; give memory_gib instead") from None


def _inputs(run: Run) -> tuple[str, ...]:
    named = (run.data.train, run.evaluate.data if run.evaluate else None, run.data.chat_template)
    return (*(name for name in named if name is not None), f"{run.model.path}/config.json")


def signal_lead_s(limit_s: int, *, save_s: float | None) -> int:
    """Seconds of warning to ask the queue for: two saves and a minute, the usual where none was measured, and at most a
    quarter of the job. SLURM may be a minute early, never late."""
    wanted = USUAL_LEAD_S if save_s is None else round(60 + 2 * save_s)
    return max(LEAST_LEAD_S, min(wanted, limit_s // 4))


def _price(cluster: Cluster, run: Run | None, preset: Preset) -> float | None:
    if cluster.usd_per_gpu_hour is not None:
        return cluster.usd_per_gpu_hour
    name = run.hardware.gpu if run is not None and run.hardware is not None else preset.gpu
    if name is None:
        return None
    try:
        price = find_gpu(name).price()
    except GatewrightError:
        return None
    return None if price is None else price.usd_per_hour
