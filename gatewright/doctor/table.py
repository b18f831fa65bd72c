"""The table of known failures, by family; and the page of each."""

from difflib import get_close_matches

from gatewright.doctor import health
from gatewright.doctor.cause import Cause
from gatewright.doctor.causes import (
    adapters,
    checkpoints,
    data,
    gpu_memory,
    gpu_memory_pages,
    hardware,
    host_memory,
    kernels,
    network,
    numerics,
    slurm,
    storage,
    training,
)
from gatewright.spec.errors import UserError

UNRECOGNISED = Cause(
    code="GW500",
    name="unrecognised",
    kind="unknown",
    title="An error that is not in the table",
    text="The run ended with an error that is not in the table: {error}",
    why="The doctor knows this table only. It names the earliest exception that nothing else explains, and leaves the "
    "judgement to the reader.",
    fix=("Read the traceback above that line; the last frame that is in your own or the trainer's code is the place.",),
)

FAMILIES: tuple[tuple[str, tuple[Cause, ...]], ...] = (
    ("GPU memory", (*gpu_memory_pages.PAGES.values(), *gpu_memory.CAUSES)),
    ("Host memory", host_memory.CAUSES),
    ("SLURM", slurm.CAUSES),
    ("Communication", network.CAUSES),
    ("Hardware and driver", hardware.CAUSES),
    ("Kernels and their caches", kernels.CAUSES),
    ("Storage", storage.CAUSES),
    ("Numbers", numerics.CAUSES),
    ("Training step", training.CAUSES),
    ("Checkpoints and resuming", checkpoints.CAUSES),
    ("Adapters", adapters.CAUSES),
    ("Data, hub and export", data.CAUSES),
    ("Health of a run that goes on", health.PAGES),
    ("Not in the table", (UNRECOGNISED,)),
)

CAUSES: tuple[Cause, ...] = tuple(cause for _, causes in FAMILIES for cause in causes)
BY_CODE: dict[str, Cause] = {cause.code: cause for cause in CAUSES}
BY_NAME: dict[str, Cause] = {cause.name: cause for cause in CAUSES}


def explain(code: str) -> str:
    """The page of a cause as Markdown, by code or name. Raises UserError for an unknown one."""
    wanted = code.strip()
    cause = BY_CODE.get(wanted.upper()) or BY_NAME.get(wanted.lower())
    if cause is None:
        near = get_close_matches(wanted.upper(), BY_CODE, n=1) or get_close_matches(wanted.lower(), BY_NAME, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; codes are {CAUSES[0].code} to GW599"
        raise UserError(f"{code[:80]!r} is not a code of the doctor{hint}")
    return page(cause)


def page(cause: Cause) -> str:
    """One cause as Markdown: what it is, why it happens, how it is recognised, what to do."""
    lines = [f"### {cause.code} {cause.name}", "", f"**{cause.title}.** {cause.why}", ""]
    literals = list(dict.fromkeys(text for sign in cause.signs for text in sign.literals if len(text) > 5))
    if literals:
        lines += [f"Recognised by: {', '.join(f'`{text}`' for text in literals[:6])}.", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(cause.fix, 1)]
    if cause.changes:
        diff = [line for change in cause.changes for line in change.diff()]
        lines += ["", "```diff", *diff, "```"]
    if cause.source:
        lines += ["", f"Source: <{cause.source}>"]
    return "\n".join(lines) + "\n"


def pages() -> str:
    """All pages, as docs/doctor.md holds them."""
    parts = []
    for family, causes in FAMILIES:
        parts += [f"## {family}\n", *(page(cause) for cause in sorted(causes, key=lambda cause: cause.code))]
    return "\n".join(parts)
