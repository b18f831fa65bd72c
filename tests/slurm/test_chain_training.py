"""A real training over many links of a few seconds, with all that goes wrong on a cluster, ends in the same weights."""

import os
import signal
import subprocess
import time
from pathlib import Path

import tiny
from chains import (
    GATEWRIGHT,
    events_of,
    kill_for_memory,
    kill_link,
    stage,
    steps_of,
    story,
    submit,
    wait_until,
    working,
)
from lab import Lab

from gatewright.campaign.progress import event_time, read_progress
from gatewright.spec.read import dump_run
from gatewright.spec.run import Run

STEPS = 40


def training(folder: Path, **changes: object) -> Run:
    settings: dict[str, object] = {
        "train__steps": STEPS, "train__save_every_steps": 3, "train__warmup_steps": 5,
        "train__tokens_per_step": 4000, "method__adapter__dropout": 0.1,
        "evaluate__data": str(folder / "heldout.jsonl"), "evaluate__every_steps": 20,
        "cluster": {"time_limit": "14s", "links": 40, "memory_gib": 4},
    }  # fmt: skip
    return tiny.make_run(folder, "qwen3_moe", **settings | changes)


def write(run: Run, folder: Path) -> Path:
    file = folder / f"{run.run}.yaml"
    file.write_text(dump_run(run))
    return file


def adapter(run: Run) -> bytes:
    return (run.folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_chain_finishes_alone_and_with_the_weights_of_an_undisturbed_run(lab: Lab, tmp_path: Path) -> None:
    undisturbed = training(tmp_path, run="undisturbed")
    began = time.time()
    lab.run(*GATEWRIGHT, "train", str(write(undisturbed, tmp_path)), cwd=tmp_path, timeout_s=500)
    startup_s = (event_time(steps_of(undisturbed.folder)[0]) or began) - began

    # links of a few seconds beyond what a start takes on this machine, and under its load of today
    cluster = {"time_limit": f"{round(2.5 * startup_s + 12)}s", "links": 40, "memory_gib": 4}
    run = training(tmp_path, run="chain", cluster=cluster)
    file = write(run, tmp_path)
    # a login session that is lost: the shell, and all that it started, is hung up on
    session = subprocess.Popen(
        ["bash", "-c", f"{' '.join(GATEWRIGHT)} submit {file}; sleep 300"],
        cwd=tmp_path, env=lab.env, start_new_session=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    folder = stage(tmp_path, "chain", "train")
    lab.wait_for(lambda: folder.lives(), "the first link", within_s=60)
    os.killpg(session.pid, signal.SIGHUP)
    session.wait()

    troubles = ["scancel", "node down", "out of memory", "kill -9"]
    disturbed: list[str] = []
    deadline = time.monotonic() + 280
    while not folder.done.exists():
        assert not folder.halt.exists(), story(folder)
        assert time.monotonic() < deadline, story(folder)
        life = working(folder)
        if troubles and life is not None and life.job not in disturbed and has_saved(run, life.started):
            disturb(lab, troubles.pop(0), life.job, life.nodes)
            disturbed.append(life.job)
        time.sleep(0.1)
    lives = folder.lives()
    assert not troubles, story(folder)
    assert len([life for life in lives if life.outcome != "left"]) >= 5, story(folder)
    assert adapter(run) == adapter(undisturbed)
    proofs = [event for event in events_of(run.folder) if event["kind"] == "resume"]
    assert len(proofs) >= 4
    assert all(proof["loss_then"] == proof["loss_now"] and proof["same_data"] and proof["same_rng"] for proof in proofs)
    assert continuous(run)
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=30)
    lab.wait_for(lambda: not lab.leftovers(), "all processes to be gone", within_s=10)


def has_saved(run: Run, since: float) -> bool:
    """Whether the present life has made progress; without, a second trouble in a row halts the chain, as it should."""
    return read_progress(run.folder, since=since).saved_step is not None


def has_stepped(run: Run, since: float) -> bool:
    """Whether the trainer of the present life has made a step."""
    seen = read_progress(run.folder, since=since)
    return seen.step_s is not None


def disturb(lab: Lab, trouble: str, job: str, node: str) -> None:
    match trouble:
        case "scancel":
            lab.run("scancel", job)
        case "node down":
            lab.set_node(node, "down")
            time.sleep(0.5)
            lab.set_node(node, "resume")
        case "out of memory":
            kill_for_memory(lab, job, word="gatewright")
        case "kill -9":
            assert kill_link(job)


def continuous(run: Run) -> bool:
    """Whether each process went on where its checkpoint was, and every step that was made twice gave the same."""
    first: dict[int, dict[str, object]] = {}
    for event in steps_of(run.folder):
        numbers = {name: event[name] for name in ("loss", "lr", "grad_norm", "tokens", "target_tokens")}
        if first.setdefault(int(str(event["step"])), numbers) != numbers:
            return False
    return sorted(first) == list(range(1, STEPS + 1))


def test_a_hopeless_run_stops_at_the_gate_and_no_further_link_begins(lab: Lab, tmp_path: Path) -> None:
    cluster = {"time_limit": "40s", "links": 2, "memory_gib": 4}
    run = training(
        tmp_path, run="chain", train__steps=200_000, train__save_every_steps=50, train__tokens_per_step=400,
        cluster=cluster, evaluate=None,
    )  # fmt: skip
    file = write(run, tmp_path)
    submit(lab, file)
    folder = stage(tmp_path, "chain", "train")
    lab.wait_for(folder.halt.exists, "the gate", within_s=90)
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)
    assert steps_of(run.folder)[-1]["step"] == 25
    [life] = folder.lives()
    assert life.outcome == "hopeless" and life.checkpoint_after == 25
    for words in ("hopeless at step 25", "would fit: cluster.links: ", "would fit: train.steps: "):
        assert words in life.reason
    said = lab.run(*GATEWRIGHT, "status", "chain", cwd=tmp_path)
    assert "halted" in said and "would fit: cluster.links" in said


def test_a_signal_to_the_batch_script_saves_and_the_next_link_goes_on(lab: Lab, tmp_path: Path) -> None:
    run = training(tmp_path, run="chain", train__steps=30, train__save_every_steps=1000, train__tokens_per_step=400,
                   evaluate=None,
                   cluster={"time_limit": "2m", "links": 3, "memory_gib": 4})  # fmt: skip
    submit(lab, write(run, tmp_path))
    folder = stage(tmp_path, "chain", "train")
    wait_until(folder, lambda: (life := working(folder)) and has_stepped(run, life.started), "a step", within_s=60)
    lab.run("scancel", "--batch", "--signal=USR1", folder.lives()[0].job)
    wait_until(folder, folder.done.exists, "the end", within_s=60)
    first, second = folder.lives()
    assert (first.outcome, second.outcome) == ("saved", "done"), story(folder)
    assert first.checkpoint_after == first.last_step == second.checkpoint_before
