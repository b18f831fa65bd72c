"""Two ranks in a job, one task a GPU by srun or one launcher a node by torchrun: the queue's warning reaches both."""

from pathlib import Path

import pytest
import tiny
from chains import events_of, stage, steps_of, story, submit, wait_until, working
from lab import Lab

from gatewright.spec.read import dump_run


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_warning_to_the_batch_script_saves_on_both_ranks(lab: Lab, tmp_path: Path, launcher: str) -> None:
    cluster = {
        "time_limit": "4m", "links": 3, "memory_gib": 4, "launcher": launcher,
        "env": ["MASTER_ADDR=127.0.0.1"],  # the names of the fake nodes are known to SLURM alone
    }  # fmt: skip
    run = tiny.make_run(
        tmp_path, "qwen3_moe", run="two", train__steps=60, train__save_every_steps=1000,
        train__micro_batch_tokens=100, parallel__ep=2, cluster=cluster,
        hardware={"gpu": "h200", "per_node": 2, "nodes": 1},
    )  # fmt: skip
    file = tmp_path / "two.yaml"
    file.write_text(dump_run(run))
    submit(lab, file)
    folder = stage(tmp_path, "two", "train")
    wait_until(folder, lambda: len(steps_of(run.folder)) >= 3, "a step", within_s=120)
    life = working(folder)
    assert life is not None
    lab.run("scancel", "--batch", "--signal=USR1", life.job)
    wait_until(folder, folder.done.exists, "the end", within_s=120)
    first, second = folder.lives()
    assert (first.outcome, second.outcome) == ("saved", "done"), story(folder)
    assert first.checkpoint_after == first.last_step == second.checkpoint_before
    [proof] = [event for event in events_of(run.folder) if event["kind"] == "resume"]
    assert proof["loss_then"] == proof["loss_now"] and proof["same_data"] and proof["same_rng"]
