"""check: files in, a verdict out. Read, ask the planner, go down the rules, sort what they find."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gatewright.planner.catalogue import find_gpu
from gatewright.preflight.ask import ask_planner
from gatewright.preflight.catalogue import FAMILY, RULES
from gatewright.preflight.fault import Edit, Fault, Rule
from gatewright.preflight.gather import Gathered, Given, gather
from gatewright.preflight.job import Written
from gatewright.preflight.reading import Unread
from gatewright.preflight.rules import files
from gatewright.preflight.source import Source, hide
from gatewright.spec.errors import RunFileError, UserError
from gatewright.spec.finding import SEVERITIES, Finding, Number, Place, Severity
from gatewright.spec.keys import nearest
from gatewright.spec.read import read_run

_IGNORE = re.compile(r"#\s*gatewright:\s*ignore\s*(?:\[([\w\s,-]*)\])?")
MAX_CHARS = 400
"""Of a sentence: values of a hostile file are not repeated whole."""


@dataclass(frozen=True, slots=True)
class Repair:
    """An edit that a finding proposes."""

    code: str
    edit: Edit
    safe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is wrong with a run, worst first."""

    files: tuple[str, ...]
    tools: tuple[str, ...]
    """Tools whose configs were read."""
    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    unread: tuple[Unread, ...] = ()
    """Keys and values that were not understood."""
    unjudged: tuple[str, ...] = ()
    """What was not judged, and what it would take."""
    ignored: int = 0
    """Findings put aside by a comment in a file."""
    sources: tuple[Source, ...] = ()

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 where a run would fail or waste a campaign, else 0."""
        return 1 if self.count("error") else 0


def check(
    paths: Sequence[Path | str],
    *,
    given: Given | None = None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Verdict:
    """Judge files together, and the files that they name.

    `select` and `ignore` are codes, beginnings of codes (GW2) or names of rules; none selected means all.
    Raises UserError for a rule or a GPU that does not exist; whatever is wrong with a file is a finding.
    """
    given = given or Given()
    for name in (*select, *ignore):
        _known(name)
    if given.gpu is not None:
        find_gpu(given.gpu)
    found = gather([Path(path) for path in paths], given=given)
    job = ask_planner(found.job)
    rules = [rule for rule in RULES if wanted(rule, select, ignore)]
    judged = [(rule, fault) for rule in rules if (fault := rule.judge(job)) is not None]
    judged += [(rule, fault) for rule, fault in file_faults(found) if rule in rules]
    ignores = {source.name: ignored_lines(source) for source in found.sources}
    kept = [(rule, fault) for rule, fault in judged if not is_ignored(rule, fault, ignores)]
    kept.sort(key=lambda pair: _order(*pair))
    return Verdict(
        files=tuple(dict.fromkeys(found.names)),
        tools=tuple(sorted(job.tools)),
        findings=tuple(finding(rule, fault, found) for rule, fault in kept),
        repairs=tuple(Repair(rule.code, fault.edit, rule.safe) for rule, fault in kept if fault.edit is not None),
        unread=tuple(found.unread),
        unjudged=(job.unjudged,) if job.unjudged else (),
        ignored=len(judged) - len(kept),
        sources=tuple(found.sources),
    )


# --- which rules ------------------------------------------------------------------------------------------------


def matches(rule: Rule, name: str) -> bool:
    return rule.code.startswith(name.strip().upper()) or rule.name == name.strip().lower()


def wanted(rule: Rule, select: Iterable[str], ignore: Iterable[str]) -> bool:
    """Selected (or nothing is) and not ignored."""
    chosen = list(select)
    if any(matches(rule, name) for name in ignore):
        return False
    return not chosen or any(matches(rule, name) for name in chosen)


def _known(name: str) -> None:
    if not any(matches(rule, name) for rule in RULES):
        near = nearest(name, [word for rule in RULES for word in (rule.code, rule.name)])
        raise UserError(f"no rule is called {name[:60]!r}" + (f"; did you mean {near}?" if near else ""))


# --- what is wrong with the files themselves ----------------------------------------------------------------------


def file_faults(found: Gathered) -> Iterator[tuple[Rule, Fault]]:
    for name, why in found.unreadable:
        yield (
            files.UNREADABLE,
            Fault(why, (Written(None, "", name, 0),), "give a config, an sbatch script or a folder of weights"),
        )
    for twice in found.twice:
        yield files.TWICE, Fault(f"{twice.key} is {twice.why}", (twice.written,), "keep one")
    for said in found.not_found:
        text = f"{said.key} names {said.value}, which is not here, so it was not judged"
        yield files.MISSING, Fault(text, (said,), "run the check where the file is, or give it as well")
    for unread in found.unread:
        if "did you mean" in unread.why:
            yield files.MISSPELT, Fault(f"{unread.key}: {unread.why}", (unread.written,), "correct the key")
    for source in found.sources:
        if "gatewright" in found.job.tools and source.path.suffix in (".yaml", ".yml") and is_run_file(source):
            try:
                read_run(source.path)
            except RunFileError as error:
                yield files.MISTAKE, Fault(str(error), (), "correct the run file")


def is_run_file(source: Source) -> bool:
    return re.search(r"^run:", source.text, re.M) is not None and re.search(r"^train:", source.text, re.M) is not None


# --- comments that ignore ------------------------------------------------------------------------------------------


def ignored_lines(source: Source) -> dict[int, tuple[str, ...]]:
    """Line to the rules ignored there, `*` for all; line 0 holds for the whole file (a comment on a line of its
    own)."""
    found: dict[int, tuple[str, ...]] = {}
    for number, line in enumerate(source.lines, start=1):
        if match := _IGNORE.search(line):
            names = tuple(part.strip() for part in (match[1] or "").split(",") if part.strip()) or ("*",)
            where = 0 if line.lstrip().startswith("#") and not line.startswith("#SBATCH") else number
            found[where] = (*found.get(where, ()), *names)
    return found


def is_ignored(rule: Rule, fault: Fault, ignores: dict[str, dict[int, tuple[str, ...]]]) -> bool:
    """The comment stands on a line that the finding rests on, or on a line of its own in one of its files."""
    for said in fault.at:
        lines = ignores.get(said.file, {})
        names = (*lines.get(0, ()), *lines.get(said.line, ()))
        if any(name == "*" or matches(rule, name) for name in names):
            return True
    return False


# --- findings ----------------------------------------------------------------------------------------------------


def _order(rule: Rule, fault: Fault) -> tuple[int, str, int, str]:
    first = next((said for said in fault.at if said.file), None)
    where = (first.file, first.line) if first else ("", 0)
    return SEVERITIES.index(rule.severity), *where, rule.code


def finding(rule: Rule, fault: Fault, found: Gathered) -> Finding:
    """The noun that reports and the doctor share."""
    lines = {source.name: source.lines for source in found.sources}
    names = (*found.names, *filter(None, [found.job.probe_file]))
    places = dict.fromkeys(said.place for said in fault.at if said.file and said.file.startswith(names))
    numbers: dict[str, Number] = {
        said.key: said.value
        for said in fault.at
        if isinstance(said.value, int | float) and not isinstance(said.value, bool)
    }
    text = fault.text if len(fault.text) <= MAX_CHARS or rule is files.MISTAKE else fault.text[:MAX_CHARS] + "…"
    return Finding(
        code=rule.code,
        name=rule.name,
        kind=FAMILY[rule.code],
        severity=rule.severity,
        text=text,
        places=tuple(with_text(place, lines) for place in places),
        numbers=tuple(numbers.items()),
        fix=(fault.fix,) if fault.fix else (),
        source=rule.source,
    )


def with_text(place: Place, lines: dict[str, list[str]]) -> Place:
    held = lines.get(place.file, [])
    text = hide(held[place.line - 1].strip()[:120]) if 0 < place.line <= len(held) else ""
    return Place(file=place.file, line=place.line, text=text)
