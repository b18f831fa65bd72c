"""Stopping in time, the gate, and the proof of a resume, in real runs of tiny models."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from rich.console import Console
from safetensors.torch import load_file

from gatewright.spec.errors import CheckpointError
from gatewright.spec.run import Run
from gatewright.train import loop
from gatewright.train.deadline import Deadline
from gatewright.train.gate import GateKeeper
from gatewright.train.optim import learning_rate
from gatewright.train.resume import prove_resume, take_proof
from gatewright.train.setup import set_up
from gatewright.train.state import read_progress, restore
from gatewright.train.step import train_step
from gatewright.train.stop import Interrupted, StopRequest


def test_the_lead_holds_the_longest_step_two_saves_and_a_margin() -> None:
    deadline = Deadline(end=10_000.0, started=9_000.0)
    assert deadline.lead_s == 2 * 50.0 + 20.0  # nothing measured: a twentieth of the link is taken for a save
    for seconds in (40.0, *[3.0] * 20):
        deadline.step_took(seconds)
    deadline.save_took(7.0, stall_s=0.5)
    deadline.save_took(5.0, stall_s=0.4)
    assert deadline.lead_s == 3.0 + 2 * 7.0 + 20.0  # the first step, of compiling, is out of the last 20
    assert deadline.near(10_000.0 - 38.0) == "time limit in 38 s" or deadline.near(10_000.0 - 36.0) is not None
    assert deadline.near(10_000.0 - 40.0) is None
    deadline.saving = True  # it must end before the last one begins
    assert deadline.lead_s == 3.0 + 3 * 7.0 + 20.0


def test_the_environment_of_a_link_and_of_a_job_of_another_make() -> None:
    link = Deadline.from_environment(
        {"GATEWRIGHT_END_TIME": "500.5", "GATEWRIGHT_LINK_STARTED": "100", "GATEWRIGHT_LINKS_LEFT": "2",
         "GATEWRIGHT_STOP_FILE": "/nonexistent/stop", "SLURM_JOB_END_TIME": "900"}
    )  # fmt: skip
    assert (link.end, link.link_s, link.links_left, link.asked()) == (500.5, 400.5, 2, None)
    assert Deadline.from_environment({"SLURM_JOB_END_TIME": "900"}).end == 900.0
    nothing = Deadline.from_environment({})
    assert nothing.near() is None and nothing.asked() is None


def test_a_request_to_stop_is_heard_from_the_file_the_clock_and_a_signal(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    request = StopRequest(Deadline(stop_file=stop_file))
    assert not request.poll()
    stop_file.touch()
    with pytest.raises(Interrupted):
        request.in_step()
    assert request.poll() and request.reason == "stop file"
    late = StopRequest(Deadline(end=time.time() + 1.0, started=time.time() - 100.0))
    assert not late.poll_alone() and late.poll() and (late.reason or "").startswith("time limit")


def test_a_step_that_is_given_up_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe")
    trainer = set_up(run, log=lambda event: None)
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    batches, calls = trainer.loader.step(0), []

    def second_time() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted

    assert len(batches) > 1
    with pytest.raises(Interrupted):
        train_step(
            trainer.model, trainer.head, trainer.optimizer, trainer.gradients, batches, lr=1.0, clip_norm=None,
            loss_chunk_tokens=64, before_each=second_time,
        )  # fmt: skip
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.parameters.items())


def test_stopped_by_the_file_again_and_again_a_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    changes = {"train__steps": 30, "train__save_every_steps": 100, "method__adapter__dropout": 0.1,
               "evaluate__data": str(tmp_path / "heldout.jsonl"), "evaluate__every_steps": 10}  # fmt: skip
    whole, stopped = (tiny.make_run(tmp_path, "qwen3_moe", run=name, **changes) for name in ("whole", "stopped"))
    assert loop.train(whole, console=Console(quiet=True)) == 0
    stop_file, codes = tmp_path / "stop", []
    while not codes or codes[-1] == 85:
        codes.append(run_until_stopped(stopped, stop_file, after_steps=4, wait_s=0.003 * len(codes)))
        assert len(codes) < 30
    assert codes[-1] == 0 and len(codes) >= 4
    for file in ("adapter/adapter_model.safetensors", "checkpoints/step-00000030/state.safetensors"):
        assert (whole.folder / file).read_bytes() == (stopped.folder / file).read_bytes(), file
    proofs = tiny.events(stopped, "resume")
    assert len(proofs) == len(codes) - 1
    assert all(proof["loss_then"] == proof["loss_now"] and proof["same_data"] and proof["same_rng"] for proof in proofs)


def run_until_stopped(run: Run, stop_file: Path, *, after_steps: int, wait_s: float) -> int:
    """Runs in a child, has the file appear some steps later, and returns the exit code."""
    stop_file.unlink(missing_ok=True)
    before = len(tiny.events(run, "step")) if (run.folder / "events.jsonl").exists() else 0
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.environ["GATEWRIGHT_STOP_FILE"] = str(stop_file)
            code = loop.train(run, console=Console(quiet=True))
        finally:
            os._exit(code)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if (run.folder / "events.jsonl").exists() and len(tiny.events(run, "step")) >= before + after_steps:
            time.sleep(wait_s)
            stop_file.touch()
        time.sleep(0.002)


def test_the_clock_ends_a_run_with_code_85_after_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny.make_run(tmp_path, "llama", train__steps=100_000, train__save_every_steps=100_000)
    monkeypatch.setenv("GATEWRIGHT_END_TIME", str(time.time() + 4.0))
    monkeypatch.setenv("GATEWRIGHT_LINK_STARTED", str(time.time()))
    assert loop.train(run, console=Console(quiet=True)) == 85
    assert time.time() < float(os.environ["GATEWRIGHT_END_TIME"])
    [stop] = tiny.events(run, "stop")
    assert stop["reason"] == "interrupted" and str(stop["detail"]).startswith("time limit in")
    assert tiny.events(run, "save")[-1]["step"] == tiny.events(run, "step")[-1]["step"] == stop["step"]


def test_a_hopeless_run_saves_and_ends_with_code_3_at_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"links": 2, "time_limit": "30s", "gate": {"step": 8}}
    run = tiny.make_run(tmp_path, "llama", train__steps=100_000, train__save_every_steps=50_000, cluster=cluster)
    monkeypatch.setenv("GATEWRIGHT_END_TIME", str(time.time() + 30.0))
    monkeypatch.setenv("GATEWRIGHT_LINK_STARTED", str(time.time()))
    monkeypatch.setenv("GATEWRIGHT_LINKS_LEFT", "1")
    console = Console(record=True, width=200)
    assert loop.train(run, console=console) == 3
    [gate] = tiny.events(run, "gate")
    assert gate["hopeless"] and gate["step"] == 8 and gate["needed_s"] > gate["left_s"] > 0 and gate["save_s"] > 0
    assert tiny.events(run, "step")[-1]["step"] == 8 == tiny.events(run, "save")[-1]["step"]
    assert tiny.events(run, "stop")[0]["reason"] == "hopeless"
    text = console.export_text()
    assert "left: hopeless" in text and "saved after step 8/100000 (it cannot finish in the time it has)" in text
    [finding] = tiny.events(run, "finding")
    assert "train.save_every_steps = 50000, and a link makes" in str(finding["text"])


def test_the_gate_takes_the_median_after_the_first_five_steps_and_asks_again_at_a_tenth(tmp_path: Path) -> None:
    cluster = {"links": 3, "time_limit": "1h", "gate": {"step": 25}}
    run = tiny.make_run(tmp_path, "llama", train__steps=1000, train__save_every_steps=100, cluster=cluster)
    deadline = Deadline(end=time.time() + 3000.0, started=time.time() - 600.0, links_left=2)
    deadline.save_took(10.0, stall_s=1.0)
    gate = GateKeeper(run, deadline, steps=1000)
    asked = [step for step in range(1, 1001) if gate.stands_before(step, step_s=60.0 if step <= 5 else 2.0)]
    assert asked == [25, 100]
    checked = gate.ask(100)
    assert checked.step_s == 2.0 and checked.needed_s == 900 * 2.0 + 8 * 1.0 + 10.0 and not checked.hopeless
    assert checked.left_s == pytest.approx(3000 - deadline.lead_s + 2 * checked.link_s, abs=1.0)
    alone = GateKeeper(run, Deadline(), steps=1000)
    assert not any(alone.stands_before(step, step_s=1.0) for step in range(1, 1001))


def test_a_resume_that_is_not_the_saved_moment_is_an_error(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe")
    assert loop.train(run, console=Console(quiet=True)) == 0
    trainer = set_up(run, log=lambda event: None)
    path = run.folder / "checkpoints" / "step-00000004"
    progress = restore(path, trainer=trainer, run=run)
    assert progress.proof is not None and progress == read_progress(path)
    assert progress.proof["lr"] == learning_rate(3, steps=4, train=run.train)
    proved = prove_resume(trainer, run, progress)
    assert proved is not None and proved.loss_then == proved.loss_now and proved.same_data and proved.same_rng
    assert take_proof(trainer, run, progress) == progress.proof
    for name, value, words in (
        ("loss", progress.proof["loss"] * 1.01, "the loss of its last batch was"),
        ("batch", "0" * 16, "the data of its last step are others"),
        ("lr", 1.0, "the learning rate of its last step was 1 and is"),
    ):
        other = replace(progress, proof=progress.proof | {name: value})
        with pytest.raises(CheckpointError, match=words):
            prove_resume(trainer, run, other)
    assert prove_resume(trainer, run, replace(progress, proof=None)) is None
    weights = load_file(path / "adapter" / "adapter_model.safetensors")
    assert weights  # it is an adapter that was proved
