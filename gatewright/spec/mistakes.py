"""What is wrong with a run file, in words: pydantic's complaints and YAML's traps as one sentence a key."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gatewright.spec.document import Document, KeyPath, Mistake, Place, Spot, dotted, plain_value
from gatewright.spec.keys import Key, choose, nearest, run_keys, suggest

MAX_SHOWN = 60
"""Characters of a wrong value that are shown."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """One complaint of pydantic's, at a path of the document."""

    path: KeyPath
    kind: Literal["unknown", "absent", "rule", "wrong"]
    rule: str = ""
    """The sentence of a validator of ours."""


def validation_mistakes(error: ValidationError, written: Document) -> Iterator[Mistake]:
    """Our sentence for each spot that pydantic complains about, however many branches of a union it tried there."""
    faults: dict[KeyPath, _Fault] = {}
    for details in error.errors(include_url=False, include_input=False):
        fault = _fault(details, written.value)
        faults.setdefault(fault.path, fault)
    helped: set[str | None] = set()
    for fault in sorted(faults.values(), key=lambda fault: fault.kind != "unknown"):
        path, depth = fault.path, len(fault.path)
        if fault.kind == "wrong" and any(len(other) > depth and other[:depth] == path for other in faults):
            continue  # the other branch of a union: this one is meant, and has a fault further down
        sentence, leads_to = _sentence(fault, written)
        if fault.kind == "absent" and dotted(path) in helped:
            continue
        helped.add(leads_to)
        yield Mistake(_place(path, written), dotted(path), sentence)


def _fault(details: ErrorDetails, value: Any) -> _Fault:
    """Pydantic's complaint at its place in the document; its location also names the branches of unions."""
    path: KeyPath = ()
    for part in details["loc"]:
        if _holds(value, part):
            path, value = (*path, part), value[part]
    match details["type"]:
        case "extra_forbidden":
            return _Fault(path, "unknown")
        case "missing" if isinstance(value, dict):
            return _Fault((*path, details["loc"][-1]), "absent")
        case "value_error":
            return _Fault(path, "rule", str(details["ctx"]["error"]))
        case _:
            return _Fault(path, "wrong")


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _place(path: KeyPath, written: Document) -> Place:
    while path not in written.spots:
        path = path[:-1]
    return written.spots[path].place


def _sentence(fault: _Fault, written: Document) -> tuple[str, str | None]:
    """What is wrong and what to do, and the key that would put it right if the name is wrong."""
    if fault.kind == "unknown":
        *section, name = fault.path
        return suggest(dotted(tuple(section)), str(name))
    if fault.kind == "rule":
        return fault.rule, None
    key = run_keys()[".".join("*" if isinstance(part, int) else part for part in fault.path)]
    if fault.kind == "absent" and key.required:
        return f"this section is missing; it needs {_and(key.required)}", None
    if fault.kind == "absent":
        return f"missing; wanted {key.wanted}{_meaning(key)}", None
    value, spot = _value(fault.path, written.value), written.spots[fault.path]
    if value is None and key.keys:
        remedy = f"it needs {_and(key.required)}" if key.required else "write a key below it, or take it away"
        return f"this section is empty; {remedy}", None
    return f"got {_got(value, spot)}, wanted {key.wanted}{_change(value, spot, key)}", None


def _value(path: KeyPath, value: Any) -> object:
    for part in path:
        value = value[part]
    return value


def _got(value: object, spot: Spot) -> str:
    if value is None:
        return "nothing"
    if spot.text is None:
        return describe(value)
    text = spot.text if len(spot.text) <= MAX_SHOWN else f"{spot.text[:MAX_SHOWN]}…"
    return f'"{text}"' if spot.quoted else text


def describe(value: object) -> str:
    """The kind of a value: a section, a list, or the one value it is."""
    if isinstance(value, dict):
        return f"a section (keys: {', '.join(islice(map(str, value), 6))})" if value else "an empty section"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return f"only {value!r}" if isinstance(value, str) else f"only {value}"


def _change(value: object, spot: Spot, key: Key) -> str:
    """The last part of the sentence: what to write instead, where that can be known."""
    numeric = key.kinds & {"integer", "number"}
    if isinstance(value, str):
        plain = plain_value(value)
        if spot.quoted and numeric and isinstance(plain, int | float):
            return "; remove the quotes"
        if "boolean" in key.kinds and spot.bare_word:
            return f"; write {'true' if value.lower() in {'yes', 'on'} else 'false'}"
        if word := nearest(value, key.choices, cutoff=0.5):
            return f"; did you mean {word}?"
        if "object" in key.kinds and ":" in value:
            return "; a space must follow the ':'"
        if key.kinds == {"array"}:
            return f"; write [{value}]"
        return _meaning(key) if "such as" in key.wanted else ""
    if isinstance(value, float) and "integer" in key.kinds and value.is_integer() and abs(value) < 1e15:
        return f"; write {int(value)}"
    if spot.text is not None and "string" in key.kinds and not key.choices and not numeric:
        fits = not key.patterns or any(re.search(pattern, spot.text) for pattern in key.patterns)
        return f'; put it in quotes: "{spot.text}"' if fits else ""
    return ""


def _meaning(key: Key) -> str:
    return f" ({key.doc.rstrip('.')})" if key.doc else ""


def _and(words: Sequence[str]) -> str:
    return choose(words).replace(" or ", " and ")


def bare_word_mistakes(written: Document, known: set[str]) -> Iterator[Mistake]:
    """Texts that other YAML readers take for a switch; where a switch was wanted, there is a mistake already."""
    for path, spot in written.spots.items():
        if spot.bare_word and dotted(path) not in known:
            text = f'{spot.text} is a switch to some readers of YAML and a text to others; write "{spot.text}"'
            yield Mistake(spot.place, dotted(path), text)
