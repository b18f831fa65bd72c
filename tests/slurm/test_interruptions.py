"""Random interruptions of a chain: nothing is lost beyond the last save, nothing without progress is repeated more than
once, and nothing is left behind. Eight of them always, a hundred when slow tests are asked for."""

import hashlib
import random
import time
from pathlib import Path

import pytest
from chains import (
    events_of,
    kill_link,
    stage,
    steps_of,
    story,
    submit,
    wait_until,
    worker_process,
    working,
    write_standin,
)
from lab import Lab

from gatewright.campaign.folder import StageFolder
from gatewright.campaign.progress import read_progress

STEP_S, SAVE_EVERY = 0.05, 5
KINDS = ("USR1", "TERM", "scancel", "kill -9 link", "kill -9 worker", "node down", "requeue")


def expected(steps: int) -> str:
    value = ""
    for step in range(1, steps + 1):
        value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
    return value


@pytest.mark.parametrize(
    ("count", "steps"), [(8, 700), pytest.param(100, 5000, marks=pytest.mark.slow)], ids=["8", "100"]
)
def test_random_interruptions_cost_no_more_than_the_steps_since_the_last_save(
    lab: Lab, tmp_path: Path, count: int, steps: int
) -> None:
    draw = random.Random(count)
    file = write_standin(tmp_path, steps=steps, step_s=STEP_S, save_every=SAVE_EVERY, limit="8s", links=10 * count)
    submit(lab, file)
    folder, run_folder = stage(tmp_path), tmp_path / "runs" / "sft"
    made: list[str] = []
    deadline = time.monotonic() + 60 + 12 * count
    while len(made) < count and not folder.done.exists():
        assert time.monotonic() < deadline, f"{made}\n{story(folder)}"
        if folder.halt.exists():  # two in a row without progress: a person looks, and submits again
            lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)
            submit(lab, file)
        life = working(folder)
        # every further interruption waits for a link that works, so that it hits work and not the queue
        if life is not None and has_saved(run_folder, life.started):
            time.sleep(draw.uniform(0.0, 1.0))
            kind = draw.choice(KINDS)
            if interrupt(lab, kind, life.job, life.nodes):
                made.append(kind)
                lab.wait_for(lambda job=life.job: is_over(job), f"job {life.job} to end", within_s=40)
        time.sleep(0.05)
    assert len(made) == count, f"it was done after {made}: make it longer"
    wait_until(folder, folder.done.exists, "the end", within_s=60 + steps * STEP_S * 3)

    assert (run_folder / "result.txt").read_text() == expected(steps)
    assert lost_steps(run_folder) == []
    assert repeated_without_progress(folder) <= 1, story(folder)
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=30)
    lab.wait_for(lambda: not lab.leftovers(), "all processes to be gone", within_s=15)


def has_saved(run_folder: Path, since: float) -> bool:
    return read_progress(run_folder, since=since).saved_step is not None


def is_over(job: str) -> bool:
    """Whether the job's work has ended, as far as its process is concerned."""
    return worker_process(job, word="standin") is None


def interrupt(lab: Lab, kind: str, job: str, node: str) -> bool:
    """Whether there was something to interrupt."""
    worker = worker_process(job, word="standin")
    if worker is None:
        return False
    match kind:
        case "USR1" | "TERM":
            lab.run("scancel", "--batch", f"--signal={kind}", job, check=False)
        case "scancel":
            lab.run("scancel", job, check=False)
        case "kill -9 link":
            return kill_link(job)
        case "kill -9 worker":
            lab.run("kill", "-9", str(worker), check=False)
        case "node down":
            lab.set_node(node, "down")
            time.sleep(0.3)
            lab.set_node(node, "resume")
        case "requeue":
            lab.run("scontrol", "update", f"jobid={job}", "requeue=1", check=False)
            lab.run("scontrol", "requeue", job, check=False)
    return True


def lost_steps(run_folder: Path) -> list[str]:
    """Processes that began further back than the last save before them, or left a gap."""
    saved, wrong = 0, []
    for event in events_of(run_folder):
        if event["kind"] == "save":
            saved = max(saved, int(str(event["step"])))
        elif event["kind"] == "start" and (event["resumed_step"] or 0) != saved:
            wrong.append(f"began at {event['resumed_step']}, {saved} was saved")
    made = [int(str(event["step"])) for event in steps_of(run_folder)]
    return wrong + ([] if set(made) == set(range(1, max(made) + 1)) else ["steps are missing"])


def repeated_without_progress(folder: StageFolder) -> int:
    """The longest row of lives, beyond the first, that left no newer checkpoint."""
    longest = row = 0
    for life in folder.lives():
        if life.outcome in ("left", "fault"):
            continue
        row = 0 if life.progressed or life.outcome == "done" else row + 1
        longest = max(longest, row)
    return max(0, longest - 1)
