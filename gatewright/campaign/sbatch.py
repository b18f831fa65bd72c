"""The text of a job script: a pure function of the campaign, the stage and its launch. tests/golden holds examples."""

import shlex
import textwrap
from pathlib import Path

from gatewright.campaign.folder import StageFolder
from gatewright.campaign.launch import Launch
from gatewright.campaign.presets import Preset
from gatewright.spec.campaign import Campaign, Resources, Stage


def job_script(campaign: Campaign, stage: Stage, launch: Launch, *, folder: str, preset: Preset) -> str:
    """The script that the queue gets, or that --local runs (bash skips the #SBATCH lines).

    `folder` is the absolute path of the stage's folder. The same text serves every link of the chain: each one queues
    the next with it.
    """
    lines = ["#!/bin/bash"]
    if campaign.queue == "slurm":
        lines += [f"#SBATCH {option}" for option in _options(campaign, stage, folder=folder, preset=preset)]
    lines += ["", *_about(campaign, stage, launch), "set -eo pipefail", ""]
    prepare = [*launch.setup, *(_export(one.name, one.value, one.why) for one in launch.env)]
    lines += [*prepare, ""] if prepare else []
    lines += _link(launch, folder=folder)
    return "\n".join(lines) + "\n"


def _options(campaign: Campaign, stage: Stage, *, folder: str, preset: Preset) -> list[str]:
    """The #SBATCH options, in the order a person looks for them."""
    want = stage.resources
    options = [
        f"--job-name={stage.job_name}",
        "--dependency=singleton",
        f"--comment={_quoted(StageFolder(Path(folder)).comment)}",
        f"--chdir={_quoted(campaign.where)}",
        f"--output={_quoted(folder + '/%j.out')}",
        "--open-mode=append",
        "--no-requeue",
        f"--signal=B:USR1@{stage.signal_lead_s}",
        f"--time={clock(want.time_limit_s)}",
    ]
    named = {"partition": want.partition, "account": want.account, "qos": want.qos}
    options += [f"--{name}={value}" for name, value in named.items() if value]
    options += [f"--nodes={want.nodes}", f"--ntasks-per-node={want.tasks_per_node}"]
    if want.gpus_per_node:
        options.append(preset.gpu_option.format(gpus=want.gpus_per_node))
    if want.cpus_per_task:
        options.append(f"--cpus-per-task={want.cpus_per_task}")
    if want.memory_mib:
        options.append(f"--mem={_memory(want.memory_mib)}")
    return [*options, *want.options]


def _about(campaign: Campaign, stage: Stage, launch: Launch) -> list[str]:
    """What a person who opens the script wants to know."""
    text = (
        f"Written by `gatewright submit`, which writes it anew. One link of at most {stage.links}: it queues the next "
        "one as it starts, works until its time is nearly up, saves, and leaves."
        if stage.links > 1
        else "Written by `gatewright submit`, which writes it anew. One job; it may be started again after a fault."
    )
    title = f"Campaign {campaign.name}, stage {stage.name}: {launch.work}"
    # textwrap alone would make a second comment out of a newline in a command
    return [f"# {line}" for line in (*textwrap.wrap(" ".join(title.split()), 116), *textwrap.wrap(text, 116))]


def _export(name: str, value: str, why: str) -> str:
    return f"export {name}={_expanding(value)}" + (f"  # {why}" if why else "")


def _link(launch: Launch, *, folder: str) -> list[str]:
    words = [f"    {' '.join(part)}" for part in (launch.launcher, launch.command) if part]
    return [
        "trap '' USR1  # the queue's warning: nobody dies of it before the link listens",
        f"exec {shlex.quote(launch.python)} -m gatewright.campaign.link {shlex.quote(folder)} -- \\",
        " \\\n".join(words),
    ]


def clock(seconds: int) -> str:
    """Days-hours:minutes:seconds, as sbatch reads it."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def _memory(mib: int) -> str:
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def _expanding(value: str) -> str:
    """Double quotes, in which the shell still fills in variables."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") if "$(" not in value else value
    return f'"{escaped}"'


def _quoted(value: str) -> str:
    """A value of an #SBATCH line: quotes only where there is a blank."""
    return f'"{value}"' if any(sign in value for sign in " \t#") else value


def wanted_text(want: Resources) -> str:
    """`4 nodes × 8 GPUs, 24 h`: resources in a sentence."""
    nodes = f"{want.nodes} node{'s' * (want.nodes > 1)}"
    gpus = f" × {want.gpus_per_node} GPU{'s' * (want.gpus_per_node > 1)}" if want.gpus_per_node else ", no GPU"
    memory = f", {_memory(want.memory_mib)} memory" if want.memory_mib else ""
    return f"{nodes}{gpus}{memory}, at most {clock(want.time_limit_s)} a job"
