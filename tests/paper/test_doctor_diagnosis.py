"""The root comes first, what follows from it after; and where nothing is known, the doctor says so."""

import io
import json
from pathlib import Path

import pytest
from doctor_faults import HARMLESS, PLANTED
from rich.console import Console

from gatewright.doctor.diagnosis import Diagnosis, diagnose, to_json
from gatewright.doctor.follow import follow
from gatewright.doctor.health import Progress, silence
from gatewright.doctor.source import LogError
from gatewright.doctor.table import BY_CODE, CAUSES
from gatewright.doctor.text import WIDTH, render_text

GOLDEN = Path(__file__).parents[1] / "golden"
TRACE = 'Traceback (most recent call last):\n  File "/repo/train.py", line 3, in main\n    step()\n'
TIMEOUT = PLANTED["GW535"]


def doctor(text: str) -> Diagnosis:
    return diagnose([], stdin=io.BytesIO(text.encode()))


def test_every_cause_with_signs_has_a_planted_fault() -> None:
    assert {cause.code for cause in CAUSES if cause.signs} == set(PLANTED)


def test_codes_and_names_are_unique() -> None:
    assert len(BY_CODE) == len(CAUSES) == len({cause.name for cause in CAUSES})


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_is_found_in_the_middle_of_a_log(code: str) -> None:
    found = doctor(f"{HARMLESS}{PLANTED[code]}\n")
    codes = {finding.code for finding in (*found.findings, *found.contributing)}
    assert code in codes
    finding = next(finding for finding in found.findings if finding.code == code)
    assert finding.places[0].line == len(HARMLESS.splitlines()) + 1
    assert finding.fix and finding.text and finding.kind == BY_CODE[code].kind


def test_a_good_log_with_difficult_words_has_no_finding() -> None:
    found = doctor(HARMLESS)
    assert found.verdict == "healthy"
    assert found.findings == ()


def test_consequences_come_after_the_root_though_they_stand_before_it() -> None:
    """srun names the first failure at the end of the log, SLURM the OOM kill last of all."""
    found = doctor("\n".join([TIMEOUT, PLANTED["GW536"], PLANTED["GW541"], PLANTED["GW533"], PLANTED["GW515"]]))
    assert found.root is not None and found.root.kind == "host_oom"
    assert {one.code for one in found.consequences} == {"GW535", "GW536", "GW541"}
    assert [one.code for one in found.others] == ["GW533"]


def test_of_two_roots_the_earlier_one_leads() -> None:
    found = doctor(f"{PLANTED['GW565']}\n{PLANTED['GW525']}")
    assert found.root is not None and found.root.kind == "disk_quota"
    assert [one.kind for one in found.others] == ["time_limit"]


def test_an_exception_that_is_not_in_the_table_is_told_and_not_explained() -> None:
    found = doctor(f"{HARMLESS}{TRACE}KeyError: 'lenght'\n{PLANTED['GW540']}\n{TIMEOUT}\n")
    assert found.verdict == "unknown"
    assert found.root is not None and found.root.kind == "unknown" and "KeyError: 'lenght'" in found.root.text
    assert found.root.confidence == "possible"
    assert found.earliest[0].text == "KeyError: 'lenght'"


def test_a_warning_does_not_explain_an_exception_it_has_nothing_to_do_with() -> None:
    found = doctor(f"{PLANTED['GW520']}\n{TRACE}ZeroDivisionError: division by zero\n")
    assert found.verdict == "unknown"
    assert [one.code for one in found.contributing] == ["GW520"]


def test_a_known_failure_after_the_run_fell_apart_is_not_its_root() -> None:
    found = doctor(f"{TRACE}KeyError: 'x'\n{PLANTED['GW540']}\n{PLANTED['GW543']}\n")
    assert found.verdict == "unknown"
    assert [one.kind for one in found.others] == ["port_in_use"]


def test_an_exception_that_another_one_replaces_is_not_unexplained() -> None:
    chained = f"{TRACE}KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACE}"
    found = doctor(f"{chained}{PLANTED['GW565']}\n")
    assert found.root is not None and found.root.kind == "disk_quota" and found.root.confidence == "certain"


def test_a_log_of_words_alone_is_unknown_with_its_suspicious_lines() -> None:
    found = doctor("hello\nsomething failed somewhere\nbye\n")
    assert (found.verdict, found.root) == ("unknown", None)
    assert [place.line for place in found.earliest] == [2]


def test_late_rank_or_diverged_ranks_by_sequence_numbers() -> None:
    def stuck(rank: int, number: int, operation: str = "ALLREDUCE") -> str:
        return (
            TIMEOUT.replace("Rank 2", f"Rank {rank}")
            .replace("rank2", f"rank{rank}")
            .replace("SeqNum=88, OpType=ALLREDUCE", f"SeqNum={number}, OpType={operation}")
        )

    late = doctor("\n".join(stuck(rank, 88) for rank in (0, 2, 3)))
    assert late.root is not None and "same one" in late.root.text and "0, 2, 3" in late.root.text
    diverged = doctor("\n".join([stuck(0, 96120), stuck(1, 64088)]))
    assert diverged.root is not None and "different collectives" in diverged.root.text
    assert diverged.root.number == {"rank_0": "ALLREDUCE 96120", "rank_1": "ALLREDUCE 64088"}


def test_a_hang_of_zero3_with_experts_is_told_from_any_other() -> None:
    text = f"Invalidate trace cache @ step 1: expected module 2\nMixtralSparseMoeBlock\n{TIMEOUT}".replace(
        "ALLREDUCE", "_ALLGATHER_BASE"
    )
    found = doctor(text)
    assert found.root is not None and found.root.kind == "zero3_moe_hang"


def test_rings_without_trees_are_a_hang_only_where_no_step_follows() -> None:
    rings = "n1:1:1 [0] NCCL INFO Connected all rings\n"
    hung = doctor(rings * 8)
    assert hung.root is not None and hung.root.kind == "rccl_hang"
    assert doctor(rings + "{'loss': 1.0, 'grad_norm': 0.5, 'learning_rate': 1e-5}\n").findings == ()


def test_a_full_shared_memory_is_not_a_full_disk() -> None:
    found = doctor("RuntimeError: unable to write to file </torch_8>: No space left on "
"device (28)\nError while creating "
                   "shared memory segment /dev/shm/nccl-a (size 9637888)\n")  # fmt: skip
    assert found.root is not None and found.root.kind == "shm"


def test_the_last_life_counts_and_earlier_ones_are_told() -> None:
    start = "***** Running training *****\n{'loss': 1.0, 'grad_norm': 0.5, 'learning_rate': 1e-5}\n"
    found = doctor(f"{start}{PLANTED['GW525']}\n{start}{PLANTED['GW526']}\n{start}{PLANTED['GW565']}\n")
    assert found.lives == 3
    assert found.root is not None and found.root.kind == "disk_quota"
    assert [one.kind for one in found.earlier] == ["time_limit", "preempted"]


def test_a_run_that_finished_after_an_error_finished() -> None:
    found = doctor(f"{PLANTED['GW592']}\n{{'train_runtime': 99.0, 'train_loss': 1.0}}\n")
    assert found.verdict == "finished"
    assert [(one.code, one.severity) for one in found.contributing] == [("GW592", "warning")]


def test_an_error_that_the_run_went_on_after_is_a_warning() -> None:
    step = "{'loss': 1.0, 'grad_norm': 0.5, 'learning_rate': 1e-5}\n"
    found = doctor(f"{PLANTED['GW592']}\n{TRACE}KeyError: 'x'\n{step * 3}")
    assert (found.verdict, found.root) == ("healthy", None)
    assert [(one.code, one.severity) for one in found.contributing] == [("GW592", "warning")]
    still = doctor(f"{step * 9}{PLANTED['GW592']}\n{step}")
    assert still.root is not None and still.root.kind == "hub_offline"


def test_our_own_stop_event_is_explained_or_quoted() -> None:
    stop = (
        '{"v": 1, "time": "2026-01-01T00:00:00+00:00", "kind": "stop", "step": 3, "reason": "failed", "detail": "%s"}\n'
    )
    quoted = doctor(stop % "pack 7 holds no target")
    assert (quoted.verdict, quoted.tool) == ("unknown", "gatewright")
    assert quoted.root is not None and "pack 7 holds no target" in quoted.root.text
    explained = doctor(stop % PLANTED["GW565"])
    assert explained.root is not None and explained.root.kind == "disk_quota" and explained.others == ()


def test_several_files_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(f"{TIMEOUT}\n")
    (tmp_path / "rank_1.log").write_text(f"fine\n{PLANTED['GW545']}\n")
    found = diagnose([tmp_path])
    assert found.root is not None and found.root.kind == "gpu_fault_hsa"
    assert found.root.places[0].rank == 1
    assert [one.code for one in found.consequences] == ["GW535"]


def test_it_is_json_all_the_way() -> None:
    text = json.dumps(to_json(doctor(f"{HARMLESS}{TIMEOUT}\n{PLANTED['GW574']}\n")))
    assert json.loads(text)["root"]["kind"] == "loss_nan"


def test_the_text_is_as_in_the_golden_file() -> None:
    """`GOLDEN=write` in front of pytest is not offered: print it, look at it, and copy it by hand."""
    log = Path(__file__).parent / "doctor_failed.log"
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, legacy_windows=False)
    with log.open("rb") as file:
        console.print(render_text(diagnose([], stdin=io.BytesIO(file.read()))))
    shown = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
    assert shown == (GOLDEN / "doctor_failed.txt").read_text(encoding="utf-8")
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_a_job_number_means_the_outputs_with_that_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "slurm-4123.out",
        "logs/train-4123.err",
        "runs/judge/jobs/train/4123.out",
        "slurm-41234.out",
        "4123.py",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(PLANTED["GW565"] + "\n")
    found = diagnose([Path("4123")])
    assert sorted(found.files) == ["logs/train-4123.err", "runs/judge/jobs/train/4123.out", "slurm-4123.out"]
    with pytest.raises(LogError, match="job 99"):
        diagnose([Path("99")])


def test_a_run_that_works_is_silent_when_many_of_its_steps_are_missing() -> None:
    far = Progress(step=9, total_steps=90, loss_first=2.0, loss_last=1.0, step_s=60.0)
    assert silence(far, quiet_s=900, file="x") is None
    told = silence(far, quiet_s=1260, file="x")
    assert told is not None and "21 min; a step takes 60 s" in told.text
    assert silence(None, quiet_s=1e6, file="x") is None


def test_following_tells_what_changed_and_starts_over_with_a_shorter_file(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    step = "{'loss': 1.0, 'grad_norm': 0.5, 'learning_rate': 1e-5}\n"
    log.write_text(step * 60)
    watch = follow(log, every_s=0.01, patience_s=5)
    assert next(watch).verdict == "healthy"
    with log.open("a") as file:
        file.write(step * 9 + PLANTED["GW565"] + "\n")
    second = next(watch)
    assert second.root is not None and (second.root.kind, second.root.places[0].line) == ("disk_quota", 70)
    log.write_text(step)
    assert next(watch).root is None
    with pytest.raises(LogError, match="folder"):
        next(follow(tmp_path))
