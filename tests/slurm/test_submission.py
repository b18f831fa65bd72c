"""Submitting to a real SLURM: how long it takes, what is refused, and that nothing is ever half-submitted."""

import json
import subprocess
import time
from pathlib import Path

from chains import GATEWRIGHT, stage, story, submit, wait_until, write_standin
from lab import Lab

from gatewright.campaign.slurm_read import SQUEUE_FIELDS, jobs_from_json, jobs_from_text

SIX_STAGES = """\
campaign: judge
cluster: {time_limit: 10m}
stages:
  synth: {command: "true", cpus: 1, memory_gib: 1}
  sft: {command: "true", needs: [synth], links: 50, cpus: 1, memory_gib: 1}
  dpo: {command: "true", needs: [sft], links: 50, cpus: 1, memory_gib: 1}
  merge: {command: "echo merged > merged.txt", needs: [dpo], outputs: [merged.txt], cpus: 1, memory_gib: 1}
  gguf: {command: "cp merged.txt gguf.txt", needs: [merge], inputs: [extra.txt], outputs: [gguf.txt], cpus: 1}
  validate: {command: "cmp merged.txt gguf.txt", needs: [merge, gguf], cpus: 1, memory_gib: 1}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "judge.yaml"
    file.write_text(text)
    return file


def test_six_stages_are_submitted_in_two_seconds_run_in_order_and_rerun_only_what_changed(
    lab: Lab, tmp_path: Path
) -> None:
    file = write(tmp_path, SIX_STAGES)
    (tmp_path / "extra.txt").write_text("a")
    began = time.process_time()
    said = submit(lab, file)
    assert "queued synth as job" in said and "sft" in said
    assert time.process_time() - began < 2.0
    last = stage(tmp_path, "judge", "validate")
    wait_until(last, last.done.exists, "the last stage", within_s=60)
    order = [
        (name, stage(tmp_path, "judge", name).lives()[0].started)
        for name in ("synth", "sft", "dpo", "merge", "gguf", "validate")
    ]
    assert order == sorted(order, key=lambda one: one[1])
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)

    assert "nothing was left to queue" in submit(lab, file)
    (tmp_path / "extra.txt").write_text("b")
    assert "queued gguf as job" in submit(lab, file)
    wait_until(last, lambda: len(last.lives()) == 2, "validate to run again", within_s=30)
    wait_until(last, lambda: last.lives()[1].outcome == "done", "validate to be done again", within_s=30)
    assert [len(stage(tmp_path, "judge", name).lives()) for name in ("synth", "sft", "dpo", "merge", "gguf")] == [
        *(1, 1, 1, 1, 2),
    ]


def test_later_links_of_a_finished_chain_leave_within_seconds(lab: Lab, tmp_path: Path) -> None:
    file = write_standin(tmp_path, steps=5, step_s=0.01, save_every=5, limit="2m", links=9)
    submit(lab, file)
    folder = stage(tmp_path)
    wait_until(folder, folder.done.exists, "the end", within_s=30)
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)
    job = lab.run("sbatch", "--parsable", str(folder.script)).strip()
    lab.wait_for(lambda: job not in lab.job_ids(), "it to leave", within_s=20)
    start, end = lab.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%S %e").split()
    took = time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) - time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
    assert took < 5
    assert not lab.job_ids()
    assert len(folder.lives()) == 1, story(folder)


def test_a_refused_partition_and_a_limit_over_it_leave_nothing_behind(lab: Lab, tmp_path: Path) -> None:
    for wrong, words in (
        ("{partition: nowhere}", "no partition 'nowhere'; there are dev, standard"),
        ("{partition: dev, time_limit: 2h}", "cluster.time_limit is 02:00:00, partition dev allows 00:30:00"),
        ("{account: nobody, sbatch: [--nodes=99]}", "node count"),
    ):
        file = write(tmp_path, SIX_STAGES.replace("{time_limit: 10m}", wrong))
        said = submit(lab, file, check=False)
        assert "error: " in said and "Traceback" not in said
        assert words in said.lower() or words in said
        assert not lab.job_ids()


def test_a_refusal_in_the_middle_takes_back_what_was_queued(lab: Lab, tmp_path: Path) -> None:
    stages = '  a: {command: "sleep 60", cpus: 1, memory_gib: 1}\n  b: {command: "true", memory_gib: 100000}\n'
    file = write(tmp_path, f"campaign: judge\ncluster: {{time_limit: 10m}}\nstages:\n{stages}")
    said = submit(lab, file, check=False)
    assert "queued a as job" in said and "took out of the queue again" in said
    assert "error: sbatch was refused" in said and "Traceback" not in said
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)


def test_two_submitters_at_once_queue_one_chain(lab: Lab, tmp_path: Path) -> None:
    file = write_standin(tmp_path, steps=400, step_s=0.05, save_every=5, limit="5m", links=9)
    command = [*GATEWRIGHT, "submit", str(file)]
    both = [
        subprocess.Popen(
            command, cwd=tmp_path, env=lab.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    refused = said[[process.returncode for process in both].index(2)]
    assert "is submitting it at this moment" in refused or "is in the queue already" in refused
    folder = stage(tmp_path)
    wait_until(folder, folder.lives, "the first link", within_s=30)
    time.sleep(1.0)
    assert len(lab.job_ids("RUNNING")) == 1 and len(lab.job_ids("PENDING")) == 1
    said_again = submit(lab, file, check=False)
    assert "is in the queue already" in said_again
    cancelled = lab.run(*GATEWRIGHT, "cancel", "chain", cwd=tmp_path)
    assert "halted: sft" in cancelled and "cancelled jobs" in cancelled
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)
    [life] = [life for life in folder.lives() if life.outcome != "left"]
    assert life.outcome == "saved" and life.progressed, story(folder)


def test_a_dead_controller_is_one_sentence_and_a_chain_outlives_it(lab: Lab, tmp_path: Path) -> None:
    file = write_standin(tmp_path, steps=200, step_s=0.05, save_every=5, limit="40s", links=9)
    other = tmp_path / "other"
    other.mkdir()
    submit(lab, file)
    folder = stage(tmp_path)
    wait_until(folder, folder.lives, "the first link", within_s=30)
    lab.controller().terminate()  # it saves its state; killed, it would forget a job of the last seconds
    lab.controller().wait()
    try:
        refused = submit(lab, write_standin(other, steps=5, step_s=0.1, save_every=5, limit="1m", links=2), check=False)
        assert "error: " in refused and "controller does not answer" in refused and "Traceback" not in refused
        assert not (other / "runs" / "chain" / "jobs" / "campaign.json").exists()
        shown = lab.run(*GATEWRIGHT, "status", "chain", cwd=tmp_path)
        assert "sft" in shown and "by the records alone" in shown
        time.sleep(4.0)
    finally:
        lab.restart_controller()
    wait_until(folder, folder.done.exists, "the end", within_s=60)


def test_a_gpu_fault_is_tried_twice_more_on_other_nodes_and_then_a_person_is_asked(lab: Lab, tmp_path: Path) -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
    more = f"--fail-at 12 --say '{xid}'"
    file = write_standin(tmp_path, steps=40, step_s=0.02, save_every=20, limit="2m", links=1, more=more)
    submit(lab, file)
    folder = stage(tmp_path)
    lab.wait_for(folder.halt.exists, "the chain to halt", within_s=60)
    lives = folder.lives()
    assert [life.outcome for life in lives] == ["fault"] * 3, story(folder)
    assert len({life.nodes for life in lives}) == 3
    assert all("GW547 xid" in life.reason for life in lives)
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=20)


def test_squeue_reads_the_same_as_text_and_as_json(lab: Lab, tmp_path: Path) -> None:
    script = "#!/bin/bash\n#SBATCH --comment='gatewright:/a b/c'\nsleep 30\n"
    (tmp_path / "job.sh").write_text(script)
    for options in (["--dependency=singleton"], ["--begin=now+1hour"]):
        lab.run("sbatch", "-J", "one|two", "--mem=10", "--output=/dev/null", *options, str(tmp_path / "job.sh"))
    lab.wait_for(lambda: lab.job_ids("RUNNING"), "the job to run", within_s=10)
    lab.env["SLURM_TIME_FORMAT"] = "%s"
    try:
        text = lab.run("squeue", "-h", "-o", SQUEUE_FIELDS)
        as_json = lab.run("squeue", "--json")
    finally:
        del lab.env["SLURM_TIME_FORMAT"]
    alive = {str(job["job_id"]) for job in json.loads(as_json)["jobs"]} & set(lab.job_ids())
    from_text = {job.id: job for job in jobs_from_text(text)}
    from_json = {job.id: job for job in jobs_from_json(as_json) if job.id in alive}
    assert from_text.keys() == from_json.keys() and len(from_text) == 2
    for id, job in from_text.items():
        same = from_json[id]
        assert (job.name, job.state, job.comment, job.nodes, job.start) == (
            *(same.name, same.state, same.comment, same.nodes, same.start),
        )
