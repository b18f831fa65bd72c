"""Why an allocation failed, from the numbers of PyTorch's sentence; first match wins.

Order and thresholds were set on labelled cases (benchmarks/doctor_accuracy.py). On 58 of them, of which that file holds
a part, the widespread rule "over 2 GiB reserved but unallocated means fragmentation" found 5 of 8 fragmented ones and
raised 4 false alarms.
"""

from dataclasses import dataclass
from typing import Literal

from gatewright.doctor.oom_sentence import OomSentence
from gatewright.spec.finding import Confidence

OomCause = Literal[
    "absurd_request", "fraction_cap", "misreport", "other_process", "fragmentation", "mixed", "pressure", "unknown"
]

GIB = 2**30
LARGEST_CARD_BYTES = 1024 * GIB
"""No single GPU has more; a larger request needs no card to be judged against."""
ABSURD_RATIO = 1.5
"""A single request of so many times the card is a wrong shape or a matrix that should not exist; a card of the next
size would hold a smaller one."""
FOREIGN_SHARE = 0.25
"""Share of the card that others must hold before they are the cause; context and a desktop take less."""
MISREPORT_RATIO = 1.5
"""Free memory that holds the request so many times over, and was still refused, is not free for this process."""
FRAGMENTED_SHARE = 0.05
"""Share of the reserved memory that is unused: at least this is fragmentation."""
SLACK_SHARE = 0.02
"""Below this it is the ordinary slack of partly used segments; between the two it depends on the amount."""
SLACK_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class OomVerdict:
    cause: OomCause
    confidence: Confidence
    reason: str
    """The arithmetic, in words and numbers."""


def judge_oom(oom: OomSentence) -> OomVerdict:
    """The cause of one failed allocation."""
    for test in (_absurd_request, _fraction_cap, _misreport, _other_process, _fragmentation):
        if verdict := test(oom):
            return verdict
    return _pressure(oom)


def _absurd_request(oom: OomSentence) -> OomVerdict | None:
    """One piece larger than the whole card fits on no setting of it."""
    if oom.total_bytes is None:
        if oom.tried_bytes <= LARGEST_CARD_BYTES:
            return None
        return OomVerdict(
            cause="absurd_request",
            confidence="certain",
            reason=f"{size(oom.tried_bytes)} in one piece is more than any GPU has: a wrong shape or dtype",
        )
    if oom.tried_bytes <= ABSURD_RATIO * oom.total_bytes:
        return None
    return OomVerdict(
        cause="absurd_request",
        confidence="certain" if oom.tried_bytes > 2 * oom.total_bytes else "likely",
        reason=f"one request of {size(oom.tried_bytes)} is {oom.tried_bytes / oom.total_bytes:.1f} × the card "
        f"({size(oom.total_bytes)}): no memory setting helps",
    )


def _fraction_cap(oom: OomSentence) -> OomVerdict | None:
    if oom.allowed_bytes is None:
        return None
    if oom.total_bytes is not None and oom.allowed_bytes >= 0.99 * oom.total_bytes:
        return None
    held = f"; {size(oom.free_bytes)} of the card are free" if oom.free_bytes else ""
    return OomVerdict(
        cause="fraction_cap",
        confidence="certain",
        reason=f"this process may use only {size(oom.allowed_bytes)} (set_per_process_memory_fraction){held}",
    )


def _misreport(oom: OomSentence) -> OomVerdict | None:
    """The driver's free memory cannot be what it says."""
    free, total = oom.free_bytes, oom.total_bytes
    if free is None or total is None:
        return None
    if free > total:
        return OomVerdict(
            cause="misreport",
            confidence="certain",
            reason=f"the driver reports {size(free)} free of {size(total)}: the numbers are not to be trusted",
        )
    if free < MISREPORT_RATIO * oom.tried_bytes:
        return None
    return OomVerdict(
        cause="misreport",
        confidence="likely",
        reason=f"{size(free)} are reported free, yet {size(oom.tried_bytes)} were refused: another limit "
        "than the card's memory (container, MPS, WSL, shared memory of an APU, or a stale reading)",
    )


def _other_process(oom: OomSentence) -> OomVerdict | None:
    foreign, total = others_bytes(oom), oom.total_bytes
    if foreign is None or total is None or foreign < FOREIGN_SHARE * total:
        return None
    return OomVerdict(
        cause="other_process",
        confidence="likely",
        reason=f"PyTorch in this process holds {size(oom.reserved_bytes or 0)} of {size(total)}; "
        f"{size(foreign)} belong to others",
    )


def others_bytes(oom: OomSentence) -> int | None:
    """Memory of other processes: what is neither free nor this process's, or what the driver lists as theirs."""
    listed = _listed_foreign(oom)
    return max((value for value in (oom.foreign_bytes, listed) if value is not None), default=None)


def _listed_foreign(oom: OomSentence) -> int | None:
    """Sum of the listed processes. Where this one is not named apart, the best match for it is left out."""
    sizes = sorted(size for _, size in oom.processes if size < (oom.total_bytes or LARGEST_CARD_BYTES) * 2)
    if not sizes:
        return None
    if not oom.process_bytes and oom.reserved_bytes is not None:
        own = next((size for size in sizes if size >= 0.98 * oom.reserved_bytes), None)
        if own is not None:
            sizes.remove(own)
    return sum(sizes)


def _fragmentation(oom: OomSentence) -> OomVerdict | None:
    """The request fits into free and unused memory together, but not into one piece."""
    free, unused, reserved, headroom = oom.free_bytes, oom.unallocated_bytes, oom.reserved_bytes, oom.headroom_bytes
    if free is None or unused is None or not reserved or headroom is None:
        return None
    if not free < oom.tried_bytes <= free + unused or unused < SLACK_SHARE * reserved:
        return None
    sentence = (
        f"{size(unused)} ({unused / reserved:.1%} of what PyTorch holds) lie unused between live tensors; "
        f"{size(oom.tried_bytes)} are asked, {size(free)} are free in one piece, head-room {size(headroom)}"
    )
    if unused >= FRAGMENTED_SHARE * reserved:
        return OomVerdict(cause="fragmentation", confidence="likely", reason=sentence)
    if unused >= SLACK_BYTES:
        return OomVerdict(cause="fragmentation", confidence="possible", reason=sentence)
    if unused < 2 * (oom.tried_bytes - free):
        return None  # nearly all of the slack would have to join into one piece
    return OomVerdict(
        cause="mixed", confidence="possible", reason=f"{sentence}: little, so the card is also nearly full"
    )


def _pressure(oom: OomSentence) -> OomVerdict:
    if oom.allocated_bytes is None or oom.total_bytes is None or oom.headroom_bytes is None:
        return OomVerdict(
            cause="unknown",
            confidence="possible",
            reason=f"{size(oom.tried_bytes)} were refused; the log does not say how much was in use",
        )
    live = f"live tensors take {size(oom.allocated_bytes)} of {size(oom.total_bytes)}"
    if oom.tried_bytes > oom.total_bytes:
        missing = "one request larger than the whole card"
    elif oom.headroom_bytes < 0:
        missing = f"even in one piece, free and unused memory miss {size(-oom.headroom_bytes)}"
    else:
        missing = f"head-room {size(oom.headroom_bytes)}, too little to count on"
    return OomVerdict(cause="pressure", confidence="likely", reason=f"{live}; {size(oom.tried_bytes)} asked: {missing}")


def size(value_bytes: int) -> str:
    """Bytes as PyTorch prints them, so that a reader finds the number in the log."""
    for limit, unit in ((2**40 * 10, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value_bytes) >= limit:
            scale = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[unit]
            return f"{value_bytes / scale:,.2f} {unit}"
    return f"{value_bytes} bytes"
