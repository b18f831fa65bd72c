"""Diagnosis: the root of a failure first, then what led to it, what followed, and how the run was doing."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from gatewright.doctor.beside_plan import beside_plan
from gatewright.doctor.cause import Cause, Log, Role, Seen, Sighting, finding
from gatewright.doctor.health import Progress, health, progress
from gatewright.doctor.scan import STEPS_AFTER, Life, Scan, scan_log
from gatewright.doctor.source import LogError, chunks, find_logs, open_log
from gatewright.doctor.table import BY_CODE, UNRECOGNISED
from gatewright.spec.finding import Confidence, Finding, Place
from gatewright.spec.plan import Knob, MemoryEstimate
from gatewright.spec.run import Run

Verdict = Literal["failed", "unknown", "healthy", "finished"]
_LASTING = {"loss_nan", "loss_zero_grad"}
"""Kinds that spoil the run though it goes on."""
_WARNING = re.compile(r"\b(?:\w*Warning|WARNING|warnings\.warn|WARN(?!.*failure))\b")
"""Words that make a line a warning, whatever it warns of."""
MAX_CONSEQUENCES = 8
MAX_EARLIEST = 6
_LOWER: dict[Confidence, Confidence] = {"certain": "likely", "likely": "possible", "possible": "possible"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer to `gatewright doctor`."""

    verdict: Verdict
    """unknown: something failed, and nothing in the table explains it."""
    root: Finding | None
    contributing: tuple[Finding, ...] = ()
    """Did not stop the run, but may explain the root."""
    consequences: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    """Further failures that the root does not explain."""
    health: tuple[Finding, ...] = ()
    earlier: tuple[Finding, ...] = ()
    """Roots of earlier lives of the run, in order."""
    earliest: tuple[Place, ...] = ()
    """Earliest suspicious lines, where the root is not known."""
    progress: Progress | None = None
    tool: str = ""
    lives: int = 1
    files: tuple[str, ...] = ()
    lines: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All, the root first."""
        root = (self.root,) if self.root else ()
        return (*root, *self.others, *self.contributing, *self.consequences, *self.health)


def diagnose(
    paths: Sequence[Path],
    *,
    stdin: BinaryIO | None = None,
    run: Run | None = None,
    planned: MemoryEstimate | None = None,
    knobs: Sequence[Knob] = (),
) -> Diagnosis:
    """Reads logs (files, folders, gzip) or, without paths, standard input.

    With the run file, changes show the present value; with a plan, memory is told beside it, and what each of its
    knobs is predicted to save. Raises LogError where there is nothing to read.
    """
    scans: list[Scan] = []
    notes: list[str] = []
    if paths:
        files, notes = find_logs(paths)
        for path in files:
            try:
                with open_log(path) as file:
                    scans.append(scan_log(chunks(file, name=str(path)), file=str(path)))
            except LogError as error:
                if len(files) == 1:
                    raise
                notes.append(str(error))
    elif stdin is not None:
        scans.append(scan_log(chunks(stdin, name="standard input"), file="stdin"))
    scans = [scan for scan in scans if scan.bytes]
    if not scans:
        where = ", ".join(str(path) for path in paths[:3]) or "standard input"
        raise LogError(f"{where}: empty; wanted the output of a run (stdout and stderr, or events.jsonl)")
    return judge(scans, notes=notes, run=run, planned=planned, knobs=knobs)


def judge(
    scans: Sequence[Scan],
    *,
    notes: Sequence[str] = (),
    run: Run | None = None,
    planned: MemoryEstimate | None = None,
    knobs: Sequence[Knob] = (),
) -> Diagnosis:
    """The diagnosis of scanned logs; the last life counts, earlier ones are told."""
    tool = _tool(scans)
    settings = _settings(run)
    main = max(scans, key=lambda scan: (scan.series.seen, scan.lines))
    points = [one for scan in scans for one in health(scan.series, file=scan.file)]
    zero = [one for one in points if one.kind == "loss_zero_grad"]
    current = [scan.lives[-1] for scan in scans]
    result = _judge_life(current, zero, tool, settings)
    earlier = [
        found.root
        for scan in scans
        for life in scan.lives[:-1]
        if life.failed and (found := _judge_life([life], [], tool, settings)).root is not None
    ]
    root = result.root
    return replace(
        result,
        root=root if root is None or planned is None else beside_plan(root, planned, knobs, tool=tool),
        health=tuple(one for one in points if one not in result.findings),
        earlier=tuple(one for one in earlier if one is not None),
        progress=progress(main.series),
        tool=tool,
        lives=max(len(scan.lives) for scan in scans),
        files=tuple(scan.file for scan in scans),
        lines=sum(scan.lines for scan in scans),
        bytes=sum(scan.bytes for scan in scans),
        notes=tuple(notes),
    )


def _judge_life(lives: Sequence[Life], zero: Sequence[Finding], tool: str, settings: dict[str, str]) -> Diagnosis:
    """Orders what one life of the run shows, over all its logs."""
    log = Log(
        tool=tool,
        kinds=frozenset(BY_CODE[code].kind for life in lives for code in life.sightings),
        steps=sum(life.steps for life in lives),
        settings=settings,
    )
    found = [(cause, one) for cause, seen in _merged(lives) if (one := finding(cause, seen, log)) is not None]
    codes = {cause.code for cause, _ in found}
    unread = sorted((one for life in lives for one in life.unexplained(codes)), key=_order_of(lives))
    found, survived = _apart(found, lives)
    unread = [one for one in unread if not _went_on(one.place, lives)]
    by_role = {role: [one for cause, one in found if _role(cause, one) is role] for role in Role}
    roots = _in_order([*by_role[Role.ROOT], *(one for one in zero if one.confidence != "possible")], lives)
    generic = _in_order(by_role[Role.GENERIC], lives)
    cascades = _in_order(by_role[Role.CASCADE], lives)
    hints = _in_order([*by_role[Role.HINT], *_as_warnings(survived)], lives)
    unknown = _unknown(unread, log)
    if _ended_well(lives, [*roots, *generic, *cascades]):
        return Diagnosis(verdict="finished", root=None, contributing=tuple(_as_warnings([*roots, *hints])))
    if roots and unknown is not None and _between(unknown, roots[0], cascades):
        roots, generic = [], [unknown, *roots, *generic]
    elif roots and unknown is not None and unknown.places[0].line < roots[0].places[0].line:
        roots[0] = replace(roots[0], confidence=_LOWER[roots[0].confidence])
        generic = [unknown, *generic]
    elif unknown is not None and not roots:
        generic = _in_order([unknown, *generic], lives)
        generic.sort(
            key=lambda one: one.code == UNRECOGNISED.code and len(generic) > 1 and generic[0].kind == "host_oom"
        )
    ordered = [*roots, *generic, *cascades, *(one for one in zero if one.confidence == "possible")]
    if not ordered:
        return _without_failure(lives, hints)
    root = ordered[0]
    known = root.code != UNRECOGNISED.code
    return Diagnosis(
        verdict="failed" if known else "unknown",
        root=root,
        others=tuple(one for one in (*roots, *generic) if one is not root and not _follows(one, root)),
        contributing=tuple(hints),
        consequences=tuple(_in_order(_consequences(root, generic, cascades), lives)[:MAX_CONSEQUENCES]),
        earliest=() if known else _earliest(lives),
    )


def _consequences(root: Finding, generic: Sequence[Finding], cascades: Sequence[Finding]) -> list[Finding]:
    return [one for one in (*generic, *cascades) if one is not root and (one in cascades or _follows(one, root))]


def _follows(one: Finding, root: Finding) -> bool:
    """Whether a report that something died is about the death that the root explains."""
    cause = BY_CODE[one.code]
    return cause.role is Role.GENERIC and one.code != UNRECOGNISED.code and one.places[0].line >= root.places[0].line


def _apart(
    found: Sequence[tuple[Cause, Finding]], lives: Sequence[Life]
) -> tuple[list[tuple[Cause, Finding]], list[Finding]]:
    """Findings that can have ended the run, and those after which it went on."""
    survived = [
        one
        for cause, one in found
        if cause.role is not Role.HINT
        and one.kind not in _LASTING
        and all(_went_on(place, lives) for place in one.places)
    ]
    return [(cause, one) for cause, one in found if one not in survived], survived


def _went_on(place: Place, lives: Sequence[Life]) -> bool:
    """Whether several steps were done after the line."""
    recent = next((life.recent_steps for life in lives if life.file == place.file), [])
    return len(recent) == STEPS_AFTER and place.line < recent[0]


def _without_failure(lives: Sequence[Life], hints: Sequence[Finding]) -> Diagnosis:
    """No known failure and no traceback: hints lead, else suspicious lines, else all is well."""
    finished = any(life.ended_well_line for life in lives)
    progressing = any(life.steps for life in lives)
    earliest = _earliest(lives)
    if hints and not finished and not progressing:
        return Diagnosis(verdict="failed", root=hints[0], contributing=tuple(hints[1:]))
    if finished:
        return Diagnosis(verdict="finished", root=None, contributing=tuple(hints))
    if progressing or not earliest:
        verdict: Verdict = "healthy" if progressing else "unknown"
        return Diagnosis(verdict=verdict, root=None, contributing=tuple(hints), earliest=earliest)
    return Diagnosis(verdict="unknown", root=None, contributing=tuple(hints), earliest=earliest)


def _merged(lives: Sequence[Life]) -> Iterable[tuple[Cause, Seen]]:
    """Each cause with its sightings over all logs, in the order of the logs."""
    codes = dict.fromkeys(code for life in lives for code in life.sightings)
    for code in codes:
        parts = [life.seen(code) for life in lives if code in life.sightings]
        cause = parts[0].first.cause
        sightings = tuple(sighting for part in parts for sighting in part.sightings)[: max(cause.keep, 4)]
        yield (
            cause,
            Seen(
                sightings=sightings,
                occurrences=sum(part.occurrences for part in parts),
                last_line=parts[-1].last_line,
            ),
        )


def _role(cause: Cause, one: Finding) -> Role:
    """The role of what a judgement turned a sighting into."""
    if cause.role is Role.ROOT and one.kind not in _LASTING and all(_WARNING.search(p.text) for p in one.places):
        return Role.HINT
    if one.code == cause.code:
        return cause.role
    return Role.CASCADE if cause.role is Role.CASCADE else Role.ROOT


def _in_order(findings: Sequence[Finding], lives: Sequence[Life]) -> list[Finding]:
    """Earliest first: by log, then by line."""
    files = {life.file: number for number, life in enumerate(lives)}
    return sorted(findings, key=lambda one: (one.places[0].line, files.get(one.places[0].file, 0)))


def _order_of(lives: Sequence[Life]) -> Any:
    files = {life.file: number for number, life in enumerate(lives)}
    return lambda sighting: (sighting.place.line, files.get(sighting.place.file, 0))


def _unknown(unread: Sequence[Sighting], log: Log) -> Finding | None:
    """The earliest exception that nothing explains."""
    if not unread:
        return None
    seen = Seen(sightings=tuple(unread[:4]), occurrences=len(unread), last_line=unread[-1].place.line)
    found = finding(UNRECOGNISED, seen, log)
    return None if found is None else replace(found, confidence="possible")


def _between(unknown: Finding, root: Finding, cascades: Sequence[Finding]) -> bool:
    """Whether the run already fell apart between an unexplained exception and the first known root."""
    first, last = unknown.places[0], root.places[0]
    return first.file == last.file and any(
        first.line < place.line < last.line for one in cascades for place in one.places if place.file == first.file
    )


def _ended_well(lives: Sequence[Life], failures: Sequence[Finding]) -> bool:
    """Whether the run says that it finished, after the last sign of failure."""
    end = {life.file: life.ended_well_line for life in lives if life.ended_well_line}
    if not end:
        return False
    return all(place.line < end.get(place.file, 2**63) for one in failures for place in one.places) and not any(
        one.kind in _LASTING for one in failures
    )


def _as_warnings(findings: Sequence[Finding]) -> list[Finding]:
    return [replace(one, severity="warning" if one.severity == "error" else one.severity) for one in findings]


def _earliest(lives: Sequence[Life]) -> tuple[Place, ...]:
    places = [place for life in lives for place in life.suspicious]
    return tuple(sorted(places, key=lambda place: place.line)[:MAX_EARLIEST])


def _tool(scans: Sequence[Scan]) -> str:
    """The trainer that wrote the log: the first of these that left a trace."""
    seen = {tool for scan in scans for tool in scan.tools}
    return next((tool for tool in ("gatewright", "huggingface", "megatron", "deepspeed") if tool in seen), "")


def _settings(run: Run | None) -> dict[str, str]:
    """Dotted keys of the run file with their values as text."""
    if run is None:
        return {}
    flat: dict[str, str] = {}
    stack: list[tuple[str, Any]] = [("", run.model_dump(mode="json"))]
    while stack:
        prefix, value = stack.pop()
        for key, below in value.items():
            if isinstance(below, dict):
                stack.append((f"{prefix}{key}.", below))
            elif below is not None:
                flat[f"{prefix}{key}"] = str(below)
    return flat


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values for `--json`."""
    far = diagnosis.progress
    return {
        "verdict": diagnosis.verdict,
        "root": diagnosis.root.as_json() if diagnosis.root else None,
        "others": [one.as_json() for one in diagnosis.others],
        "contributing": [one.as_json() for one in diagnosis.contributing],
        "consequences": [one.as_json() for one in diagnosis.consequences],
        "health": [one.as_json() for one in diagnosis.health],
        "earlier": [one.as_json() for one in diagnosis.earlier],
        "earliest": [{"file": p.file, "line": p.line, "text": p.text} for p in diagnosis.earliest],
        "progress": None
        if far is None
        else {
            "step": far.step,
            "total_steps": far.total_steps,
            "loss_first": _plain(far.loss_first),
            "loss_last": _plain(far.loss_last),
            "step_s": _plain(far.step_s),
            "remaining_s": _plain(far.remaining_s),
        },
        "tool": diagnosis.tool,
        "lives": diagnosis.lives,
        "files": list(diagnosis.files),
        "lines": diagnosis.lines,
        "bytes": diagnosis.bytes,
        "notes": list(diagnosis.notes),
    }


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None
