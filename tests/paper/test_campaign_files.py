"""Campaign files, refusals, and the hash that decides what runs again."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gatewright.campaign import refuse
from gatewright.campaign.advice import advise
from gatewright.campaign.build import build, signal_lead_s
from gatewright.campaign.fingerprint import stage_fingerprint
from gatewright.campaign.folder import JobsFolder, JobsFolderError, write_json
from gatewright.campaign.progress import RunProgress
from gatewright.campaign.read import read_asked
from gatewright.campaign.submit import Refused, prepare
from gatewright.planner.plan_run import plan_run
from gatewright.spec.campaign import Stage
from gatewright.spec.errors import RunFileError
from gatewright.spec.read import dump_run, read_run
from gatewright.spec.run import Run

RUN = """\
run: judge
model: {path: Qwen3-30B-A3B, dtype: bfloat16}
method: {adapter: {rank: 16, targets: [attention, experts]}}
data: {train: data.jsonl, max_tokens: 4096}
train: {tokens_per_step: 131072, steps: 2000, lr: 1.0e-4, checkpointing: full, save_every_steps: 50}
hardware: {gpu: h200, per_node: 8}
parallel: {ep: 8, dense: zero2}
cluster: {machine: h200, time_limit: 24h, links: 3, partition: gpu}
"""


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def run_of(text: str = RUN) -> Run:
    Path("run.yaml").write_text(text)
    return read_run(Path("run.yaml"))


def stage_of(text: str = RUN) -> Stage:
    Path("run.yaml").write_text(text)
    return build(read_asked(Path("run.yaml")), queue="slurm", submission=1).campaign.stages[0]


def asked_error(text: str) -> str:
    Path("c.yaml").write_text(text)
    with pytest.raises(RunFileError) as raised:
        read_asked(Path("c.yaml"))
    return str(raised.value)


def test_a_circle_of_stages_is_named() -> None:
    said = asked_error(
        "campaign: a\nstages:\n  x: {command: 'true'}\n  b: {command: 'true', needs: [x, d]}\n"
        "  c: {command: 'true', needs: [b]}\n  d: {command: 'true', needs: [c]}\n"
    )
    assert said == (
        "c.yaml: the stages wait for each other: b needs d needs c needs b; take one `needs` out of the circle"
    )


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("  a: {command: 'true', needs: [bb]}\n  b: {command: 'true'}\n",
         "stages.a.needs: no stage is called 'bb'; did you mean b?"),
        ("  a: {comand: 'true'}\n", "c.yaml:3: stages.a.comand: unknown key; did you mean command?"),
        ("  a: {command: 'true', run: r.yaml}\n", "stages.a: give either run or command"),
        ("  a: {command: 'true', time_limit: 5}\n", "stages.a.time_limit"),
        ("  a: {run: nothing.yaml}\n", "nothing.yaml: no such file"),
        ("  'a b': {command: 'true'}\n", "stages.a b"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_campaign_file_is_one_sentence(stages: str, words: str) -> None:
    assert words in asked_error(f"campaign: a\nstages:\n{stages}")


def test_two_stages_in_one_run_folder_are_refused() -> None:
    run_of()
    said = asked_error("campaign: a\nstages:\n  a: {run: run.yaml}\n  b: {run: run.yaml, needs: [a]}\n")
    assert "stages a and b both train in runs/judge" in said


def test_a_save_interval_over_half_a_link_is_refused_with_the_number_that_would_do() -> None:
    run, stage = run_of(), stage_of()
    assert refuse.save_interval(run, stage, step_s=10.0) is None
    said = refuse.save_interval(run, stage, step_s=1000.0, measured=True)
    assert (
        said is not None and "a link of 1-00:00:00 makes 86 steps of 1e+03 s (measured); set it to 43 or less" in said
    )
    assert refuse.save_interval(run, replace(stage, links=1), step_s=1000.0) is None


@pytest.mark.parametrize("runs_dir", ["runs/%j", "out/$SLURM_JOB_ID", "out/${SLURM_JOBID}/x", "runs/4711"])
def test_a_job_id_in_the_folder_is_refused(runs_dir: str) -> None:
    run = run_of(RUN + f"runs_dir: '{runs_dir}'\n")
    assert "holds a job id" in (refuse.job_id_in_folder(run, {"SLURM_JOB_ID": "4711"}) or "")
    assert refuse.job_id_in_folder(run_of(), {"SLURM_JOB_ID": "4711"}) is None


def test_checkpointing_that_the_plan_needs_is_asked_for() -> None:
    text = RUN.replace("checkpointing: full", "checkpointing: none").replace("per_node: 8", "per_node: 1")
    text = text.replace("parallel: {ep: 8, dense: zero2}\n", "").replace("131072", "32768, micro_batch_tokens: 32768")
    run = run_of(text)
    full = run.model_copy(update={"train": run.train.model_copy(update={"checkpointing": "full"})})
    assert not plan_run(run).fits and plan_run(full).fits
    said = refuse.checkpointing_needed(run, plan_run(run), plan_run(full))
    assert said is not None and said.endswith("set train.checkpointing: full")
    assert refuse.checkpointing_needed(full, plan_run(full), None) is None


def test_room_for_three_checkpoints_is_asked_for(tmp_path: Path) -> None:
    assert refuse.no_room(tmp_path / "runs" / "new", checkpoint_bytes=1000) is None
    said = refuse.no_room(tmp_path, checkpoint_bytes=2**50)
    assert said is not None and "3 checkpoints of 1048576.0 GiB need 3145728.0" in said
    assert refuse.checkpoint_bytes(None, RunProgress(save_bytes=77)) == 77
    assert refuse.checkpoint_bytes(plan_run(run_of()), RunProgress()) == 12 * plan_run(run_of()).trainable_parameters


@pytest.mark.parametrize(
    ("partitions", "words"),
    [
        ({"gpu": (3600.0, "up")}, "cluster.time_limit is 1-00:00:00, partition gpu allows 01:00:00"),
        ({"other": (None, "up")}, "no partition 'gpu'; there are other"),
        ({"gpu": (None, "down")}, "partition gpu is down"),
        ({"gpu": (None, "up")}, None),
        ({"gpu": (86400.0, "up")}, None),
    ],
)
def test_limits_of_partitions(partitions: dict[str, tuple[float | None, str]], words: str | None) -> None:
    said = refuse.over_partition_limit(stage_of(), partitions)
    assert said is None if words is None else words in (said or "")


def test_a_resume_with_other_settings_names_the_field_then_and_now() -> None:
    then = run_of()
    assert refuse.other_settings(then, run_of(RUN.replace("links: 3", "links: 9"))) is None
    said = refuse.other_settings(then, run_of(RUN.replace("1.0e-4", "2.0e-4")))
    assert said is not None and "train.lr: 0.0001 then, 0.0002 now" in said


def test_prepare_gathers_every_refusal_and_writes_nothing(tmp_path: Path) -> None:
    Path("run.yaml").write_text(RUN.replace("save_every_steps: 50", "save_every_steps: 2000000") + "runs_dir: r/%j\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused) as raised:
        prepare(read_asked(Path("run.yaml")), queue="slurm", environ={})
    assert "things to change first" in str(raised.value)
    assert "holds a job id" in str(raised.value) and "save_every_steps = 2000000" in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_other_settings_refuses_the_submission() -> None:
    run = run_of()
    folder = run.folder / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (run.folder / "run.yaml").write_text(dump_run(run_of(RUN.replace("rank: 16", "rank: 8"))))
    Path("run.yaml").write_text(RUN)
    with pytest.raises(Refused, match=r"method\.adapter\.rank: 8 then, 16 now"):
        prepare(read_asked(Path("run.yaml")), queue="slurm", environ={})


def test_the_hash_of_a_stage_follows_its_config_its_inputs_and_its_parents() -> None:
    text = "campaign: a\nstages:\n  x: {command: one, inputs: [in.txt]}\n  y: {command: two, needs: [x]}\n"
    Path("in.txt").write_text("1")
    jobs = JobsFolder(Path("runs/a/jobs").absolute())

    def hashes(text: str) -> list[str]:
        Path("c.yaml").write_text(text)
        campaign = build(read_asked(Path("c.yaml")), queue="slurm", submission=1).campaign
        return [stage_fingerprint(stage, jobs, where=Path.cwd()) for stage in campaign.stages]

    first = hashes(text)
    assert hashes(text.replace("campaign: a\n", "campaign: a\ncluster: {time_limit: 2h, links: 3}\n")) == first
    assert hashes(text.replace("two", "three"))[0] == first[0] and hashes(text.replace("two", "three"))[1] != first[1]
    Path("in.txt").write_text("2")
    assert hashes(text)[0] != first[0] and hashes(text)[1] == first[1]
    write_json(jobs.stage("x").done, {"fingerprint": "f"})
    assert hashes(text)[1] != first[1]


def test_the_lock_of_a_folder_is_one_submitters_and_dies_with_it(tmp_path: Path) -> None:
    jobs = JobsFolder(tmp_path / "jobs")
    with (
        jobs.held(),
        pytest.raises(JobsFolderError, match=rf"process {os.getpid()} on .* is submitting it"),
        jobs.held(),
    ):
        pass
    child = os.fork()
    if child == 0:
        lock = jobs.held()
        lock.__enter__()
        os._exit(0)  # killed while it held the lock
    os.waitpid(child, 0)
    assert (jobs.path / "submitting").exists()
    with jobs.held(wait_s=5.0):
        pass
    assert not (jobs.path / "submitting").exists()


def test_advice_for_a_hopeless_run_has_numbers_that_fit() -> None:
    gate = {"step": 25, "steps": 2000, "step_s": 120.0, "needed_s": 237_000.0, "left_s": 90_000.0, "link_s": 80_000.0}
    lines = advise(gate, replace(stage_of(), links=2, run_file=None))
    assert lines[0].startswith("hopeless at step 25: 1,975 steps at 120 s")
    links = int(lines[1].partition("cluster.links: ")[2].split()[0])
    assert 90_000 + (links - 2) * 80_000 >= 1.08 * 237_000 > 90_000 + (links - 3) * 80_000
    steps = int(lines[2].partition("train.steps: ")[2].split()[0])
    assert (steps - 25) / 1975 * 237_000 * 1.08 <= 90_000


def test_the_planner_says_how_many_nodes_would_do() -> None:
    run_of()
    gate = {"step": 25, "steps": 2000, "step_s": 10.0, "needed_s": 19_750.0, "left_s": 15_000.0, "link_s": 9_000.0}
    lines = advise(gate, replace(stage_of(), run_file=str(Path("run.yaml").absolute())))
    assert any("would fit: hardware.nodes: 2 (now 1): the planner sees steps of" in line for line in lines), lines


@pytest.mark.parametrize(
    ("limit_s", "save_s", "lead_s"), [(86400, None, 120), (86400, 100.0, 260), (240, None, 60), (6, None, 1)]
)
def test_the_lead_of_the_signal(limit_s: int, save_s: float | None, lead_s: int) -> None:
    assert signal_lead_s(limit_s, save_s=save_s) == lead_s
