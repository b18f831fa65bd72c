"""Reading: what one file says, in the neutral vocabulary, with what was not understood."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gatewright.preflight.job import Written
from gatewright.preflight.source import Leaf
from gatewright.spec.keys import nearest

MAX_SUGGESTIONS = 20
"""Unknown keys of one file for which the nearest known one is looked up."""
LARGEST = 10**9
SIZES_TEXT = """
micro_batch accumulation global_batch eval_batch max_tokens lora_rank tp pp cp ep etp ranks launcher_processes
launcher_nodes nodes tasks_per_node gpus_per_node cpus_per_task max_prompt_tokens links hpz
"""
SIZES = frozenset(SIZES_TEXT.split())
"""Fields of Job that count something there is at least one of."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A key that was not understood, and why."""

    key: str
    file: str
    line: int
    why: str

    @property
    def written(self) -> Written[str]:
        return Written(None, self.key, self.file, self.line)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}: {self.why}"


@dataclass(slots=True)
class Reading:
    """One file, or one command line in it."""

    tool: str
    file: str
    values: dict[str, Written[Any]] = field(default_factory=dict)
    """Field of Job to what was written."""
    env: dict[str, Written[str]] = field(default_factory=dict)
    versions: dict[str, Written[str]] = field(default_factory=dict)
    names: list[Written[str]] = field(default_factory=list)
    """Other files that this one names."""
    secrets: list[Written[str]] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    written_twice: list[Unread] = field(default_factory=list)

    def put(self, name: str, value: object, leaf: Leaf) -> None:
        """Note a value; a size that no run can have is listed as not understood."""
        if name in SIZES and isinstance(value, int) and not 0 < value <= LARGEST:
            why = f"got {value}, wanted a whole number from 1 to {LARGEST:,}"
            self.unread.append(Unread(leaf.key, self.file, leaf.line, why))
            return
        self.values[name] = Written(value, leaf.key, self.file, leaf.line)


class NotThat(ValueError):
    """A value of the wrong kind; the text says what is wanted."""


Convert = Callable[[Any], object]
Table = Mapping[str, tuple[str, Convert]]
"""Key of a tool to (field of Job, how its value is read)."""

_YES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _YES:
        raise NotThat("true or false")
    return _YES[text]


def whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    text = str(value).strip().replace("_", "")
    if not text.lstrip("+-").isdecimal() or len(text) > 18:
        raise NotThat("a whole number")
    return int(text)


def number(value: object) -> float:
    if isinstance(value, bool | list | dict):
        raise NotThat("a number")
    try:
        found = float(str(value))
    except ValueError:
        raise NotThat("a number") from None
    if found != found or abs(found) == float("inf"):
        raise NotThat("a finite number")
    return found


def word(value: object) -> str:
    if isinstance(value, list | dict):
        raise NotThat("one value")
    return "true" if value is True else "false" if value is False else str(value)


def words(value: object) -> tuple[str, ...]:
    """A list, or a text with commas or blanks between the words."""
    if isinstance(value, list):
        return tuple(word(item) for item in value)
    return tuple(part for part in word(value).replace(",", " ").split() if part)


def names(value: object) -> tuple[str, ...]:
    """The keys of a mapping."""
    if not isinstance(value, dict):
        raise NotThat("a mapping")
    return tuple(value)


def seconds(value: object) -> int:
    """SLURM's time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    text = str(value).strip()
    days, dash, rest = text.rpartition("-")
    parts = [whole(part) for part in rest.split(":")]
    if len(parts) > 3 or any(part < 0 for part in parts):
        raise NotThat("a time such as 2-00:00:00")
    if dash:
        parts = [*parts, 0, 0][:3]
        return whole(days) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def attention(value: object) -> str:
    """One name for the kernels that the tools name differently."""
    text = word(value).lower()
    if text in ("flash_attention_2", "flash_attn", "flash", "fa2", "flash_attention"):
        return "flash"
    if text in ("flash_attention_3", "fa3", "flash_3"):
        return "flash3"
    return {"sdp": "sdpa", "disabled": "eager", "unfused": "eager", "math": "eager"}.get(text, text)


def understand(reading: Reading, leaves: Iterable[Leaf], *, table: Table, known: frozenset[str]) -> None:
    """Put each leaf into its field; list what the tool does not know, and values that say nothing we can use."""
    for leaf in leaves:
        top = leaf.key.split(".")[0].split("[")[0]
        if leaf.key in table:
            name, convert = table[leaf.key]
            if leaf.value is None or leaf.value in ("auto", "none", "None", "null", ""):
                continue
            try:
                reading.put(name, convert(leaf.value), leaf)
            except NotThat as wanted:
                why = f"got {str(leaf.value)[:60]!r}, wanted {wanted}"
                reading.unread.append(Unread(leaf.key, reading.file, leaf.line, why))
        elif top not in known:
            near = nearest(top, known, cutoff=0.8) if len(reading.unread) < MAX_SUGGESTIONS else None
            why = f"{reading.tool} has no such key" + (f"; did you mean {near}?" if near else "")
            reading.unread.append(Unread(leaf.key, reading.file, leaf.line, why))
