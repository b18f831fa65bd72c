"""How campaigns stand, from files alone: states, costs, health, hundreds of them at once; and a run's continuity."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run as made

from gatewright.campaign.cancel import CANCELLED, cancel
from gatewright.campaign.child import Signals
from gatewright.campaign.folder import JobsFolder, write_json
from gatewright.campaign.progress import glance, read_progress
from gatewright.campaign.queue import Me, NoQueue
from gatewright.campaign.slurm_read import Job
from gatewright.campaign.status import find_campaigns, status_of, totals
from gatewright.campaign.status_text import bar, render_campaign, render_table
from gatewright.campaign.this_job import Link, waiting_jobs
from gatewright.report import facts
from gatewright.report.read import read_run_folder
from gatewright.spec.campaign import Campaign, Life, Resources, Stage

NOW = time.time()


def stage(name: str = "train", *, folder: Path | None = None, needs: tuple[str, ...] = ()) -> Stage:
    return Stage(
        name=name, job_name="judge", needs=needs, links=6, resources=Resources(nodes=2, gpus_per_node=8),
        usd_per_gpu_hour=1.5, config=f"config of {name}", folder=None if folder is None else str(folder), run_file=None,
    )  # fmt: skip


def life(job: str, **more: object) -> Life:
    settings: dict[str, object] = {
        "stage": "train", "job": job, "restart": 0, "submission": 1, "started": NOW - 7200, "nodes": "n1",
        "checkpoint_before": None,
    }  # fmt: skip
    return Life(**settings | more)  # type: ignore[arg-type]


def write(root: Path, name: str, *stages: Stage, queue: str = "slurm") -> JobsFolder:
    jobs = JobsFolder(root / name / "jobs")
    jobs.write_campaign(
        Campaign(name=name, submission=1, time=NOW, where=str(root), host="login", queue=queue, stages=stages)
    )
    return jobs


def queued(jobs: JobsFolder, *, state: str, id: str = "7", reason: str = "", start: float | None = None) -> Job:
    comment = f"gatewright:{jobs.path.absolute()}/train"
    return Job(id=id, name="judge", state=state, reason=reason, comment=comment, start=start)


def state(jobs: JobsFolder, queue: list[Job] | None) -> tuple[str, str]:
    [found] = [one for one in status_of(jobs, queue, now=NOW).stages if one.name == "train"]
    return found.state, found.detail


def test_the_state_of_a_stage_is_its_own_word_before_the_queues(tmp_path: Path) -> None:
    jobs = write(tmp_path, "judge", stage())
    folder = jobs.stage("train")
    assert state(jobs, []) == ("ready", "in no queue; `gatewright submit` again goes on")
    assert state(jobs, None)[0] == "ready"
    waiting = state(jobs, [queued(jobs, state="PENDING", reason="Priority", start=NOW + 60)])
    assert waiting[0] == "queued" and waiting[1].startswith("Priority, expected ")
    folder.write_life(life("7"))
    assert state(jobs, [queued(jobs, state="RUNNING")]) == ("running", "")
    assert state(jobs, None) == ("running", "by its record; the queue did not answer")
    write_json(folder.halt, {"reason": "two links stood still", "job": "7", "time": NOW})
    assert state(jobs, [queued(jobs, state="COMPLETED")]) == ("halted", "two links stood still")
    write_json(folder.done, {"fingerprint": "f", "config": "config of another"})
    assert state(jobs, [])[0] == "halted"
    write_json(folder.done, {"fingerprint": "f", "config": "config of train"})
    assert state(jobs, [queued(jobs, state="RUNNING")]) == ("done", "")


@pytest.fixture
def signals() -> Iterator[Signals]:
    kept = {
        number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    yield Signals()
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_chain_takes_no_job_of_a_stage_whose_name_only_begins_like_its_own(tmp_path: Path, signals: Signals) -> None:
    jobs = write(tmp_path, "judge", stage("sft"), stage("sft2", needs=("sft",)))

    class Waiting(NoQueue):
        def jobs(self, comment: str) -> list[Job]:
            all_jobs = [
                Job(id=id, name="judge", state="PENDING", reason="", comment=jobs.stage(name).comment, start=None)
                for id, name in (("7", "sft"), ("8", "sft"), ("9", "sft2"))
            ]
            return [job for job in all_jobs if job.comment.startswith(comment)]

    me = Me(job="7", restart=0, nodes="n1")
    link = Link(folder=jobs.stage("sft"), command=(), queue=Waiting(), me=me, began=NOW, signals=signals)
    assert waiting_jobs(link) == ["8"]


def test_costs_count_every_start_and_a_killed_one_until_its_job_was_gone(tmp_path: Path) -> None:
    jobs = write(tmp_path, "judge", stage())
    folder = jobs.stage("train")
    folder.write_life(life("6", outcome="saved", ended=NOW - 3600))
    folder.write_life(life("7", started=NOW - 3600))
    gone = replace(queued(jobs, state="NODE_FAIL"), end=NOW - 1800)
    found = status_of(jobs, [gone], now=NOW)
    assert totals([found]) == (16 * 1.5, 16 * 1.5 * 1.5)
    assert found.stages[0].links_used == 2


def test_progress_comes_from_the_last_events_whatever_their_size(tmp_path: Path) -> None:
    clock, noise = made.Clock(), random.Random(0)
    events = [made.start(clock, steps=2000)]
    events += list(
        made.steps(
            clock, 1, 300, of=2000, routing=made.Routing(layers=48, experts=64, noise=noise, tokens=8192), noise=noise
        )
    )
    events += [made.saved(clock, 300)]
    folder = made.write_run(tmp_path / "big", events)
    assert (folder / "events.jsonl").stat().st_size > 2**20
    for seen in (glance(folder), read_progress(folder)):
        assert (seen.step, seen.saved_step) == (300, 300)
        assert seen.step_s is not None and seen.step_s > 0
    cut = (folder / "events.jsonl").read_bytes()[:-20]
    (folder / "events.jsonl").write_bytes(cut)
    assert glance(folder).step == 300


def test_two_hundred_runs_are_read_and_shown_in_a_moment(tmp_path: Path) -> None:
    clock, noise = made.Clock(), random.Random(0)
    lines = [made.start(clock, steps=500)]
    lines += list(
        made.steps(
            clock, 1, 100, of=500, routing=made.Routing(layers=8, experts=32, noise=noise, tokens=8192), noise=noise
        )
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for number in range(200):
        folder = tmp_path / f"run-{number:03d}"
        jobs = write(tmp_path, folder.name, stage(folder=folder))
        (folder / "events.jsonl").write_text(text)
        for job in range(4):
            jobs.stage("train").write_life(life(str(job), outcome="saved", ended=NOW - 60))
        (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000100" / "manifest.json").write_text("{}")
    began = time.process_time()
    found = [status_of(jobs, []) for jobs in find_campaigns(tmp_path)]
    shown = render_table(found)
    assert time.process_time() - began < 0.5
    assert len(found) == 200 and shown.count("100/500") == 200
    assert "━━────────── 100/500" in shown and bar(0, 0) == ""


def test_the_verb_imports_nothing_that_reads_run_files() -> None:
    """Their classes take longer to build than two hundred runs to read."""
    program = "import sys, gatewright.campaign.status_text; print('gatewright.spec.run' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_one_campaign_in_full_tells_every_start_and_why_it_halted(tmp_path: Path) -> None:
    jobs = write(tmp_path, "judge", stage(), stage("merge", needs=("train",)))
    folder = jobs.stage("train")
    folder.write_life(life("6", outcome="saved", ended=NOW - 3600, reason="time limit in 40 s", first_step=1,
                           last_step=40, checkpoint_after=40))  # fmt: skip
    folder.write_life(life("7", restart=1, started=NOW - 3000, outcome="hopeless", ended=NOW, reason="hopeless at 25"))
    write_json(folder.halt, {"reason": "hopeless at 25\n  would fit: cluster.links: 9", "job": "7", "time": NOW})
    text = render_campaign(status_of(jobs, [], now=NOW))
    for words in ("1–40", "7 (start 2)", "time limit in 40 s", "would fit: cluster.links: 9", "for train"):
        assert words in text


def test_cancelling_writes_the_halt_first_and_asks_what_works_to_stop(tmp_path: Path) -> None:
    jobs = write(tmp_path, "judge", stage(), queue="local")
    folder = jobs.stage("train")
    folder.write_life(life("7"))
    done = cancel(jobs, NoQueue())
    assert done.stages == ("train",)
    assert json.loads(folder.halt.read_text())["reason"] == CANCELLED
    assert folder.stop("7_0").is_file()
    assert cancel(jobs, NoQueue()).stages == ()


def test_the_report_says_that_a_run_goes_on_without_gap_or_repeat(tmp_path: Path) -> None:
    clock, noise = made.Clock(), random.Random(0)
    proof = {"loss_then": 1.5, "loss_now": 1.5, "tolerance": 1e-4, "lr_then": 1e-4, "lr_now": 1e-4, "same_data": True,
             "same_rng": True}  # fmt: skip
    gate = {"step": 25, "steps": 60, "step_s": 2.0, "evaluate_s": 0.0, "save_s": 1.0, "needed_s": 70.0, "left_s": 600.0,
            "link_s": 300.0, "hopeless": False}  # fmt: skip

    def part(first: int, last: int) -> list[dict[str, object]]:
        return list(made.steps(clock, first, last, of=60, routing=None, noise=noise))

    events = [made.start(clock, steps=60), *part(1, 30), clock.event("gate", 0.1, **gate)]
    events += [
        made.start(clock, steps=60, resumed_step=20),
        clock.event("resume", 0.1, step=20, **proof),
        *part(21, 60),
    ]
    report = read_run_folder(made.write_run(tmp_path / "whole", events))
    told = dict(facts.training(report))
    assert told["continuity"] == "no step missing; 1 resume proved: the same loss, data, learning rate, random numbers"
    assert told["gate"] == "on time at step 25: 1 min 10 s needed, 10 min 0 s left"
    assert told["steps done again"].startswith("10 ")
    with_gap = [event for event in events if event.get("step") != 40 or event["kind"] != "step"]
    report = read_run_folder(made.write_run(tmp_path / "gap", with_gap))
    assert dict(facts.training(report))["continuity"].startswith("1 step missing")
