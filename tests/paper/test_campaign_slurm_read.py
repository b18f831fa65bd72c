"""What SLURM prints, by version: the shapes of 22.05 are recorded, those of 23.02 to 25.x follow their schemas."""

import json

import pytest

from gatewright.campaign.slurm_read import (
    duration_s,
    host_list,
    jobs_from_json,
    jobs_from_text,
    partition_limits,
    steps_from_text,
)

TEXT = "12|RUNNING|None|1796006760|1796010360|n[1-2]|gatewright:/a/jobs/train|(null)|judge\n"
SQUEUE_22_05 = {
    "job_id": 12, "name": "judge", "job_state": "RUNNING", "state_reason": "None", "start_time": 1796006760,
    "end_time": 1796010360, "nodes": "n[1-2]", "comment": "gatewright:/a/jobs/train", "dependency": "", "exit_code": 0,
}  # fmt: skip
SQUEUE_23_02 = SQUEUE_22_05 | {
    "start_time": {"set": True, "infinite": False, "number": 1796006760},
    "end_time": {"set": True, "infinite": False, "number": 1796010360},
    "exit_code": {"set": True, "infinite": False, "number": 0},
}
SQUEUE_23_11 = SQUEUE_23_02 | {
    "job_state": ["RUNNING"],
    "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "infinite": False, "number": 0},
                  "signal": {"id": {"set": False, "infinite": False, "number": 0}, "name": ""}},
}  # fmt: skip
SQUEUE_25_05 = SQUEUE_23_11 | {"job_state": ["RUNNING", "COMPLETING"]}


def squeue(job: dict[str, object]) -> str:
    return json.dumps({"meta": {}, "errors": [], "jobs": [job]})


@pytest.mark.parametrize("shape", [SQUEUE_22_05, SQUEUE_23_02, SQUEUE_23_11, SQUEUE_25_05])
def test_squeue_says_the_same_in_every_shape(shape: dict[str, object]) -> None:
    [by_text], [by_json] = jobs_from_text(TEXT), jobs_from_json(squeue(shape))
    names = ("id", "name", "state", "reason", "start", "end", "nodes", "comment", "dependency")
    assert [getattr(by_json, name) for name in names] == [getattr(by_text, name) for name in names]
    assert by_text.alive and not by_text.pending


def test_exit_codes_and_signals_in_every_shape() -> None:
    old = jobs_from_json(squeue(SQUEUE_22_05 | {"job_state": "FAILED", "exit_code": 85 << 8}))[0]
    assert (old.exit_code, old.signal) == (85, None)
    killed = jobs_from_json(squeue(SQUEUE_22_05 | {"job_state": "TIMEOUT", "exit_code": 15}))[0]
    assert (killed.exit_code, killed.signal) == (0, 15)
    code = {"return_code": {"set": True, "number": 0}, "signal": {"id": {"set": True, "number": 9}, "name": "KILL"}}
    new = jobs_from_json(squeue(SQUEUE_23_11 | {"job_state": ["FAILED"], "exit_code": code}))[0]
    assert (new.exit_code, new.signal) == (0, 9)


def test_times_that_are_not_set_are_none() -> None:
    never = {"set": False, "infinite": False, "number": 0}
    for shape in (SQUEUE_22_05 | {"start_time": 0, "end_time": 0}, SQUEUE_23_11 | {"start_time": never}):
        assert jobs_from_json(squeue(shape))[0].start is None
    [pending] = jobs_from_text("13|PENDING|Dependency|N/A|N/A||(null)|singleton(unfulfilled)|a|b\n")
    assert (pending.start, pending.pending, pending.name, pending.comment) == (None, True, "a|b", "")


def test_sacct_json_nests_what_squeue_does_not() -> None:
    job = {
        "job_id": 12, "name": "judge", "state": {"current": ["CANCELLED"], "reason": "None"}, "nodes": "n1",
        "time": {"start": 1796006760, "end": 1796010360}, "comment": {"job": "gatewright:/a", "administrator": ""},
        "exit_code": {"return_code": 0, "signal": {"signal_id": 15, "name": "TERM"}},
    }  # fmt: skip
    [found] = jobs_from_json(squeue(job))
    assert (found.state, found.start, found.comment, found.signal) == ("CANCELLED", 1796006760, "gatewright:/a", 15)
    older = job | {"state": {"current": "TIMEOUT", "reason": "None"}}
    assert jobs_from_json(squeue(older))[0].state == "TIMEOUT"


def test_sacct_text_gives_the_job_and_its_steps() -> None:
    text = (
        "12|COMPLETED|0:0|1796006760|1796006790|n1\n12.batch|COMPLETED|0:0|1796006760|1796006790|n1\n"
        "12.0|OUT_OF_MEMORY|0:125|1796006761|1796006780|n1\n13|CANCELLED by 1000|0:15|1796006761|Unknown|n2\n"
    )
    found = steps_from_text(text)
    assert [job.state for job in found["12"]] == ["COMPLETED", "COMPLETED", "OUT_OF_MEMORY"]
    assert (found["12"][2].signal, found["13"][0].state, found["13"][0].end) == (125, "CANCELLED", None)


@pytest.mark.parametrize("text", ["", "{}", '{"jobs": [{}]}', '{"jobs": 3}', "[1]"])
def test_what_is_no_json_of_slurm_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        jobs_from_json(text)


@pytest.mark.parametrize("line", ["12|RUNNING", "slurm_load_jobs error: Unable to contact"])
def test_what_is_no_line_of_squeue_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match="unpack"):
        jobs_from_text(line)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2-00:00:00", 172800), ("30:00", 1800), ("1:00:00", 3600), ("5", 300), ("3-12", 302400), ("infinite", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_partitions_and_their_limits() -> None:
    assert partition_limits("standard|2-00:00:00|up\ndev|30:00|up\nold|infinite|down\n") == {
        "standard": (172800, "up"), "dev": (1800, "up"), "old": (None, "down"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7],gpu-01", ("n1", "n2", "n3", "n7", "gpu-01")),
        ("nid[000998-001001]", ("nid000998", "nid000999", "nid001000", "nid001001")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("", ()),
    ],
)
def test_host_lists(text: str, names: tuple[str, ...]) -> None:
    assert host_list(text) == names
