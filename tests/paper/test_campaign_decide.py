"""What a link does next, from the records alone: the state machine of a chain, case by case."""

from dataclasses import replace
from pathlib import Path

import pytest

from gatewright.campaign.clock import end_here
from gatewright.campaign.decide import ELSEWHERE, Go, Halt, next_step, retry_of
from gatewright.campaign.ending import ending_of_killed, judge_ending
from gatewright.campaign.progress import RunProgress
from gatewright.campaign.slurm_read import Job
from gatewright.doctor.table import CAUSES
from gatewright.spec.campaign import Life, Outcome, Resources, Stage


def life(number: int, outcome: Outcome | None, *, before: int | None = None, after: int | None = None) -> Life:
    return Life(
        stage="train", job=str(number), restart=0, submission=1, started=float(number), nodes=f"n{number}",
        outcome=outcome, reason=f"reason {number}", checkpoint_before=before, checkpoint_after=after,
    )  # fmt: skip


def test_links_go_until_all_are_used() -> None:
    assert next_step([], links=3) == Go(number=1, exclude=())
    past = [life(1, "saved", after=10), life(2, "killed", before=10, after=15)]
    assert next_step(past, links=3) == Go(number=3, exclude=())
    assert next_step([*past, life(3, "saved", before=15, after=20)], links=3) == Halt(
        "all 3 links are used up; raise cluster.links and submit again to go on"
    )


def test_two_links_without_a_newer_checkpoint_halt_the_chain() -> None:
    past = [life(1, "saved", after=10), life(2, "killed", before=10, after=10), life(3, "crashed", before=10, after=10)]
    step = next_step(past, links=9)
    assert isinstance(step, Halt)
    assert step.reason.startswith("2 links in a row ended without a newer checkpoint (job 2: reason 2; job 3: reason 3")
    assert isinstance(next_step(past[:2], links=9), Go)
    assert isinstance(next_step([*past[:2], life(3, "killed", before=10, after=11)], links=9), Go)
    late = [life(1, "killed", before=10, after=10), life(2, "killed", before=12, after=12)]
    assert isinstance(next_step(late, links=9), Go)  # the first one saved step 12 after its record was closed


def test_a_fault_of_a_node_is_tried_twice_more_elsewhere_and_costs_no_link() -> None:
    faults = [replace(life(n, "fault", before=None), faulty_nodes=(f"n{n}",)) for n in (1, 2, 3)]
    assert next_step(faults[:1], links=1) == Go(number=1, exclude=("n1",))
    assert next_step(faults[:2], links=1) == Go(number=1, exclude=("n1", "n2"))
    assert isinstance(next_step(faults, links=1), Halt)


def test_what_a_retry_cannot_cure_halts_at_once() -> None:
    for outcome in ("failed", "hopeless"):
        assert next_step([life(1, outcome, after=25)], links=9) == Halt("reason 1")


def test_links_that_had_nothing_to_do_do_not_count() -> None:
    assert next_step([life(n, "left") for n in range(9)], links=2) == Go(number=1, exclude=())


@pytest.mark.parametrize(
    ("kind", "retry"),
    [
        ("node_fail", "elsewhere"), ("gpu_fault_xid", "elsewhere"), ("gpu_fault_hsa", "elsewhere"),
        ("rccl_hang", "elsewhere"), ("time_limit", "again"), ("preempted", "again"), (None, "again"),
        ("gpu_oom", "never"), ("gpu_oom_resume", "never"), ("loss_nan", "never"), ("quota", "never"),
        ("chat_template", "never"), ("disk_full", "never"), ("host_oom", "again"),
    ],
)  # fmt: skip
def test_the_retry_table(kind: str | None, retry: str) -> None:
    assert retry_of(kind) == retry


def test_the_retry_table_speaks_of_kinds_that_the_doctor_knows() -> None:
    assert {cause.kind for cause in CAUSES} >= ELSEWHERE - {"no_gpu"}
    memory = {cause.kind for cause in CAUSES if cause.kind.startswith("gpu_oom")}
    assert memory and {retry_of(kind) for kind in memory} == {"never"}


@pytest.mark.parametrize(
    ("began", "end", "noted"),
    [
        (1005.0, 4600.0, False),  # clocks agree: the controller's end
        (700.0, 700.0 + 3600.0, True),  # this node is 300 s behind: its own start and the granted time
        (9000.0, 9000.0 + 3600.0, True),  # far ahead: otherwise it would think that it is over
    ],
)
def test_the_end_by_this_nodes_clock(began: float, end: float, noted: bool) -> None:
    found = end_here(began=began, start=1000.0, end=4600.0, limit_s=86400)
    assert found.time == end and bool(found.note) == noted


def test_the_run_files_limit_counts_where_it_is_the_shorter_one_or_the_queue_is_silent() -> None:
    assert end_here(began=1002.0, start=1000.0, end=1060.0, limit_s=6).time == 1008.0
    silent = end_here(began=1002.0, start=None, end=None, limit_s=600)
    assert silent.time == 1602.0 and "did not say" in silent.note


@pytest.mark.parametrize(
    ("code", "said", "detail", "outcome"),
    [
        (0, "finished", "", "done"),
        (1, "finished", "", "done"),  # torchrun, or srun, says otherwise: the run knows better
        (0, None, "", "crashed"),  # srun returns 0 when the node failed under it
        (85, "interrupted", "time limit in 40 s", "saved"),
        (1, "interrupted", "SIGTERM", "saved"),  # torchrun returns 1 whatever its workers say
        (3, "hopeless", "", "hopeless"),
        (1, "failed", "step 12: loss nan, gradient norm nan; the weights were not updated. The step's", "failed"),
        (1, "failed", "runs/a/checkpoints/step-00000050: not saved (No space left on device); 0.00 GiB", "failed"),
        (1, "failed", "rank 3: lost contact", "crashed"),
        (2, None, "", "failed"),
    ],
)
def test_the_word_of_a_run_comes_before_the_exit_code_of_its_launcher(
    code: int, said: str | None, detail: str, outcome: str, tmp_path: Path
) -> None:
    stage = Stage(
        name="train", job_name="a", needs=(), links=3, resources=Resources(), usd_per_gpu_hour=None, config="",
        folder=str(tmp_path), run_file="run.yaml",
    )  # fmt: skip
    progress = RunProgress(stop_reason=said, stop_detail=detail)
    ending = judge_ending(
        stage, life(1, None), code=code, asked="", progress=progress, log=None, offset=0, where=tmp_path
    )
    assert ending.outcome == outcome


def test_a_killed_life_is_read_from_its_steps_before_its_job() -> None:
    """A step killed for memory in a script that goes on leaves the job COMPLETED."""
    one = replace(life(12, None), job="12")
    steps = {"12": [Job(id="12", name="", state="COMPLETED"), Job(id="12.0", name="", state="OUT_OF_MEMORY")]}
    assert ending_of_killed(one, mine=[], history=steps, me="13").reason == "killed for want of memory"
    job = Job(id="12", name="train", state="NODE_FAIL")
    assert ending_of_killed(one, mine=[job], history={}, me="13").outcome == "fault"
    assert ending_of_killed(one, mine=[], history={}, me="12").outcome == "fault"
    assert ending_of_killed(one, mine=[], history={}, me="13").outcome == "killed"
