"""What SLURM prints, read: squeue, sacct and sinfo as text of fixed fields, and JSON in the shapes of 22.05 to 25.x."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SQUEUE_FIELDS = "%i|%T|%r|%S|%e|%N|%k|%E|%j"
"""Id, state, reason, start, end, nodes, comment, dependency, name; the name last, since it may hold the separator."""
SACCT_FIELDS = "JobID,State,ExitCode,Start,End,NodeList"

PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"}
RUNNING = {"RUNNING", "COMPLETING", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_NONE = {"", "(null)", "N/A", "None", "Unknown", "NONE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the queue sees it."""

    id: str
    name: str
    state: str
    """In capitals, one word: PENDING, RUNNING, COMPLETED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY …"""
    reason: str = ""
    start: float | None = None
    """Unix seconds, by the controller's clock; of a pending job, when it is expected to start."""
    end: float | None = None
    nodes: str = ""
    comment: str = ""
    dependency: str = ""
    exit_code: int | None = None
    signal: int | None = None
    """Signal that ended it."""

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def alive(self) -> bool:
        return self.state in PENDING or self.state in RUNNING


def jobs_from_text(text: str) -> list[Job]:
    """Lines of `squeue -h -o SQUEUE_FIELDS` under SLURM_TIME_FORMAT=%s. Raises ValueError for any other line."""
    jobs = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        id, state, reason, start, end, nodes, comment, dependency, name = line.split("|", 8)
        jobs.append(
            Job(
                id=id,
                name=name,
                state=_state(state),
                reason=_word(reason),
                start=_time(start),
                end=_time(end),
                nodes=_word(nodes),
                comment=_word(comment),
                dependency=_word(dependency),
            )
        )
    return jobs


def jobs_from_json(text: str) -> list[Job]:
    """`squeue --json` or `sacct --json`. Raises ValueError where it is neither.

    22.05 writes a state as a string and a time as a number; from 23.02 on a state is a list, with flags such as
    COMPLETING behind it, and a number is {set, infinite, number}. sacct nests state, times and exit code.
    """
    try:
        document = json.loads(text)
        return [_job(one) for one in document["jobs"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the JSON of squeue or sacct: {error}") from None


def steps_from_text(text: str) -> dict[str, list[Job]]:
    """Lines of `sacct -nP -o SACCT_FIELDS`: for each job the job itself first, then its steps (id 12.batch, 12.0)."""
    found: dict[str, list[Job]] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        id, state, code, start, end, nodes = line.split("|")[:6]
        exit_code, _, signal = code.partition(":")
        job = Job(
            id=id,
            name="",
            state=_state(state),
            start=_time(start),
            end=_time(end),
            nodes=_word(nodes),
            exit_code=int(exit_code) if exit_code.isdecimal() else None,
            signal=int(signal) if signal.isdecimal() and signal != "0" else None,
        )
        found.setdefault(id.partition(".")[0], []).append(job)
    return found


def partition_limits(text: str) -> dict[str, tuple[float | None, str]]:
    """Lines of `sinfo -h -o %R|%l|%a`: partition to its time limit in seconds (None: none) and its availability."""
    found = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, limit, available = line.split("|")
        found[name] = (duration_s(limit), available)
    return found


def duration_s(text: str) -> float | None:
    """`2-00:00:00`, `30:00` (minutes and seconds), `30` (minutes) or `infinite`, in seconds.

    Raises ValueError for anything else.
    """
    if text.lower() in {"infinite", "unlimited", "n/a", "not_set"}:
        return None
    if text.isdecimal():
        return int(text) * 60
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        parts += [0] * (3 - len(parts))
    while len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = parts
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def host_list(nodes: str) -> tuple[str, ...]:
    """`n[1-3,7],gpu-01` as single names, leading zeros kept."""
    return tuple(name for part in _outer_commas(nodes) for name in _expand(part))


# --- fields -------------------------------------------------------------------------------------------------------


def _job(one: Mapping[str, Any]) -> Job:
    times = one.get("time") if isinstance(one.get("time"), Mapping) else {}
    state: Any = one.get("job_state", one.get("state"))
    if isinstance(state, Mapping):  # sacct: {"current": …, "reason": …}
        one = {**one, "state_reason": state.get("reason", "")}
        state = state["current"]
    code: Any = one.get("exit_code")
    code, signal = _exit(code)
    return Job(
        id=str(one["job_id"]),
        name=str(one.get("name", "")),
        state=_state(state[0] if isinstance(state, list) else state),
        reason=_word(str(one.get("state_reason", ""))),
        start=_number(one.get("start_time", times.get("start") if times else None)),
        end=_number(one.get("end_time", times.get("end") if times else None)),
        nodes=_word(str(one.get("nodes", ""))),
        comment=_comment(one.get("comment", "")),
        dependency=_word(str(one.get("dependency", ""))),
        exit_code=code,
        signal=signal,
    )


def _exit(code: Any) -> tuple[int | None, int | None]:
    """22.05 squeue gives the wait status itself; later ones, and sacct, {return_code, signal: {signal_id | id}}."""
    if isinstance(code, Mapping):
        signal = code.get("signal") or {}
        return _whole(code.get("return_code")), _whole(signal.get("signal_id", signal.get("id"))) or None
    if isinstance(code, int):
        return code >> 8, code & 0x7F or None
    return None, None


def _whole(value: Any) -> int | None:
    number = _number(value, zero=True)
    return None if number is None else int(number)


def _number(value: Any, *, zero: bool = False) -> float | None:
    if isinstance(value, Mapping):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value["number"]
    return float(value) if isinstance(value, int | float) and (value or zero) else None


def _comment(value: Any) -> str:
    return _word(str(value.get("job", "") if isinstance(value, Mapping) else value))


def _state(text: str) -> str:
    """`CANCELLED by 1000` and `CANCELLED+` are CANCELLED."""
    return text.split()[0].rstrip("+").upper()


def _word(text: str) -> str:
    return "" if text in _NONE else text


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() and text != "0" else None


def _outer_commas(text: str) -> Iterator[str]:
    part, depth = "", 0
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            yield part
            part = ""
        else:
            part += sign
    if part:
        yield part


def _expand(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            yield from _expand(f"{head}{number:0{len(first)}d}{tail}")
