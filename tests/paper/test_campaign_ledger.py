"""The ledger: many writers at once, network disks, locks that are not there, files that are broken."""

import json
import multiprocessing
import sqlite3
import time
from pathlib import Path

import pytest

from gatewright.campaign.folder import JobsFolder
from gatewright.campaign.ledger import NAMES, file_system, read_ledger, update_ledger
from gatewright.spec.campaign import Campaign, Life, Resources, Stage

STAGE = Stage(
    name="train", job_name="judge", needs=(), links=3, resources=Resources(gpus_per_node=8, nodes=2),
    usd_per_gpu_hour=2.0, config="c", folder=None, run_file=None,
)  # fmt: skip
CAMPAIGN = Campaign(name="judge", submission=1, time=0.0, where="/", host="login1", queue="slurm", stages=(STAGE,))


def life(job: int, *, hours: float = 1.0) -> Life:
    return Life(
        stage="train", job=str(job), restart=0, submission=1, started=1000.0 * job, nodes="n[1-2]", outcome="saved",
        ended=1000.0 * job + 3600 * hours, last_step=job, checkpoint_after=job, exit_code=85,
    )  # fmt: skip


def test_the_ledger_says_what_every_start_of_a_job_cost_and_so_does_its_json(tmp_path: Path) -> None:
    jobs = JobsFolder(tmp_path)
    jobs.stage("train").write_life(life(1))
    jobs.stage("train").write_life(life(2, hours=0.5))
    assert update_ledger(jobs, CAMPAIGN) is None
    rows = read_ledger(jobs.ledger)
    assert [(row["job"], row["state"], row["gpu_hours"], row["usd"]) for row in rows] == [
        ("1", "saved", 16.0, 32.0),
        ("2", "saved", 8.0, 16.0),
    ]
    assert json.loads(jobs.ledger.with_suffix(".json").read_text()) == rows
    assert list(rows[0]) == NAMES


def write_many(path: Path, first: int) -> None:
    jobs = JobsFolder(path)
    for job in range(first, first + 10):
        jobs.stage("train").write_life(life(job))
        assert update_ledger(jobs, CAMPAIGN) is None


def test_links_that_end_at_one_moment_lose_no_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(tmp_path, 100 * number)) for number in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    update_ledger(JobsFolder(tmp_path), CAMPAIGN)
    assert len(read_ledger(tmp_path / "ledger.sqlite")) == 40


def test_a_broken_ledger_is_put_aside_and_made_again(tmp_path: Path) -> None:
    jobs = JobsFolder(tmp_path)
    jobs.stage("train").write_life(life(1))
    jobs.ledger.write_bytes(b"this is no database" * 100)
    assert update_ledger(jobs, CAMPAIGN) is None
    assert len(read_ledger(jobs.ledger)) == 1
    assert jobs.ledger.with_suffix(".broken").is_file()


def test_a_ledger_that_cannot_be_had_is_a_sentence_and_no_error(tmp_path: Path) -> None:
    jobs = JobsFolder(tmp_path)
    jobs.ledger.mkdir()
    said = update_ledger(jobs, CAMPAIGN)
    assert said is not None and "not brought up to date" in said and "records of the stages are complete" in said


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/scratch/me/runs/ledger.sqlite", "lustre"), ("/home/me/x", "nfs4"), ("/tmp/x", "ext4"), ("/scratchy", "ext4")],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    mounts = "/dev/vda / ext4 rw 0 0\nserver:/ /home nfs4 rw 0 0\n10.0.0.1@tcp:/l /scratch lustre rw,flock 0 0\n"
    assert file_system(Path(path), mounts=mounts) == kind


def test_wal_on_a_local_disk(tmp_path: Path) -> None:
    update_ledger(JobsFolder(tmp_path), CAMPAIGN)
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_many_starts_are_written_in_a_moment(tmp_path: Path) -> None:
    jobs = JobsFolder(tmp_path)
    for job in range(300):
        jobs.stage("train").write_life(life(job))
    began = time.process_time()
    assert update_ledger(jobs, CAMPAIGN) is None
    assert time.process_time() - began < 1.0
