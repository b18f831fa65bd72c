"""Job scripts and what `cluster show` prints, against golden files; GATEWRIGHT_GOLDEN=1 writes them anew."""

import os
import sys
from pathlib import Path

import pytest

from gatewright.campaign.build import build
from gatewright.campaign.preset_text import render_preset
from gatewright.campaign.presets import find_preset, presets
from gatewright.campaign.read import read_asked
from gatewright.preflight.check import check
from gatewright.spec.errors import RunFileError

GOLDEN = Path(__file__).parent.parent / "golden"
RUN = """\
run: judge-35b
model: {{path: Qwen3-30B-A3B, dtype: bfloat16}}
method: {{adapter: {{rank: 32, targets: [attention, experts]}}}}
data: {{train: data/judge.jsonl, max_tokens: 8192}}
train: {{tokens_per_step: 1048576, steps: 2000, lr: 2.0e-4, checkpointing: full, save_every_steps: 100}}
parallel: {{ep: 8, dense: zero2}}
hardware: {{gpu: {gpu}, per_node: 8, nodes: {nodes}}}
cluster: {cluster}
"""
CAMPAIGN = """\
campaign: judge
cluster: {machine: lumi-g, account: project_1, time_limit: 4h, setup: [module load LUMI]}
stages:
  merge: {command: "gatewright export runs/sft --to merged", model: Qwen3-30B-A3B, cpus: 16, outputs: [merged]}
  gguf: {command: "python convert.py 'it''s' > model.gguf", needs: [merge], memory_gib: 64}
"""
SCRIPTS = {
    "lumi-g-container": (
        "mi250x-gcd", 4,
        "{machine: lumi-g, account: project_1, links: 6, container: {kind: singularity, image: /appl/lumi.sif}, "
        "setup: [module use /appl/local/containers/ai-modules, module load singularity-AI-bindings]}",
    ),
    "lumi-g-torchrun": ("mi250x-gcd", 2, "{machine: lumi-g, partition: small-g, launcher: torchrun, links: 3}"),
    "h200-pyxis": (
        "h200", 2, "{machine: h200, partition: gpu, qos: long, time_limit: 2d, links: 4, container: {kind: pyxis, "
        "image: nvcr.io#nvidia/pytorch:26.05, binds: ['/data:/data']}, env: ['NCCL_DEBUG=INFO', 'NCCL_IB_HCA==mlx5']}",
    ),
    "mi300x-venv": ("mi300x", 1, "{machine: mi300x, venv: /opt/venv, time_limit: 90m, sbatch: [--exclusive]}"),
    "plain": ("h200", 1, "{partition: gpu, memory_gib: 500, cpus_per_gpu: 12}"),
}  # fmt: skip


def compare(name: str, text: str) -> None:
    file = GOLDEN / name
    text = text.replace(sys.executable, "/usr/bin/python3")
    if os.environ.get("GATEWRIGHT_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"GATEWRIGHT_GOLDEN=1 writes {name} anew; review the difference"


def scripts_of(text: str, tmp_path: Path, *, queue: str = "slurm") -> dict[str, str]:
    """Scripts of a run or campaign file, with the folder they were made in called /home/me."""
    file = tmp_path / "asked.yaml"
    file.write_text(text, encoding="utf-8")
    built = build(read_asked(file), queue=queue, submission=1)
    return {name: script.replace(str(tmp_path), "/home/me") for name, script in built.scripts.items()}


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_of_a_training_run(name: str, tmp_path: Path) -> None:
    gpu, nodes, cluster = SCRIPTS[name]
    scripts = scripts_of(RUN.format(gpu=gpu, nodes=nodes, cluster=cluster), tmp_path)
    compare(f"sbatch_{name}.txt", scripts["train"])


def test_the_scripts_of_stages_that_are_commands(tmp_path: Path) -> None:
    compare("sbatch_stages.txt", "\n".join(scripts_of(CAMPAIGN, tmp_path).values()))


def test_the_script_without_a_queue(tmp_path: Path) -> None:
    run = RUN.format(gpu="h200", nodes=1, cluster="{machine: h200}")
    compare("sbatch_local.txt", scripts_of(run, tmp_path, queue="local")["train"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_rule_of_check_calls_our_own_scripts_wrong(name: str, tmp_path: Path) -> None:
    gpu, nodes, cluster = SCRIPTS[name]
    text = RUN.format(gpu=gpu, nodes=nodes, cluster=cluster)
    (tmp_path / "job.sbatch").write_text(scripts_of(text, tmp_path)["train"])
    (tmp_path / "run.yaml").write_text(text)
    found = check([tmp_path / "run.yaml", tmp_path / "job.sbatch"]).findings
    wrong = [(one.code, one.text) for one in found if one.severity != "note" and one.name != "hub-cache-in-home"]
    assert wrong == []


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_what_cluster_show_prints(preset: object) -> None:
    from gatewright.campaign.presets import Preset

    assert isinstance(preset, Preset)
    compare(f"cluster_{preset.name}.txt", render_preset(preset) + "\n")


def test_every_variable_of_a_preset_says_why() -> None:
    assert {one.name for preset in presets() for one in preset.env if len(one.why) < 8} == set()
    assert len(find_preset("lumi-g").cpu_bind.split(",")) == 8  # type: ignore[union-attr]


def test_a_container_sees_what_lies_outside_of_the_working_directory(tmp_path: Path) -> None:
    cluster = "{machine: lumi-g, container: {image: x.sif}}"
    text = RUN.format(gpu="mi250x-gcd", nodes=1, cluster=cluster).replace("data/judge.jsonl", "/scratch/a/judge.jsonl")
    script = scripts_of(f"{text}runs_dir: /flash/runs\n", tmp_path)["train"]
    assert '--bind="$PWD,/scratch/a,/flash/runs,/var/spool/slurmd' in script
    inside = scripts_of(text.replace("/scratch/a", str(tmp_path)), tmp_path)["train"]
    assert '--bind="$PWD,/var/spool/slurmd' in inside


def test_a_machine_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(RunFileError, match=r"no machine is called 'lumi'; did you mean lumi-g\? Known: h200, lumi-g"):
        find_preset("lumi")
