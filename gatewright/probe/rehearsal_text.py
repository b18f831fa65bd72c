"""A rehearsal as text that fits 100 columns."""

from gatewright.spec.rehearsal import PhaseName, Rehearsal

GIB = 2**30

BORN: dict[PhaseName, str] = {
    "load": "weights",
    "forward": "activations",
    "loss": "loss",
    "backward": "backward",
    "step": "optimizer",
}
"""Column for what each phase made and is still alive."""


def render(rehearsal: Rehearsal) -> str:
    """The peak in the first line, then a row a phase: its peak, what is alive at it, and the operator that made it."""
    peak = rehearsal.peak
    depth = f"{rehearsal.layers} layers"
    if rehearsal.depths != (rehearsal.layers,):
        depth += f", extended from {' and '.join(map(str, rehearsal.depths))}"
    documents = f"{len(rehearsal.lengths)} document" + "s" * (len(rehearsal.lengths) > 1)
    lines = [
        f"peak {peak.bytes / GIB:.2f} GiB allocated, in {peak.phase}, at {short(peak.operator, 52)}",
        f"{short(rehearsal.model, 60)}: {depth}; {rehearsal.trainable_parameters:,} of",
        f"{rehearsal.parameters:,} parameters train; step of {rehearsal.trainer}, attention {rehearsal.attention}",
        f"micro-batch {rehearsal.tokens:,} tokens in {documents}; rehearsed in {rehearsal.seconds:.1f} s",
        *layout_lines(rehearsal),
        "",
        f"{'phase':<9}{'peak GiB':>9}" + "".join(f"{title:>12}" for title in BORN.values()),
    ]
    for phase in rehearsal.phases:
        born = "".join(f"{phase.born.get(name, 0) / GIB:>12.2f}" for name in BORN)
        where = f" in layer {phase.block}" if phase.block >= 0 else ""
        lines.append(f"{phase.phase:<9}{phase.bytes / GIB:>9.2f}{born}")
        lines.append(f"{'':<11}{short(phase.operator, 70)}{where}")
    lines += [
        f"{'between':<9}{rehearsal.resident_bytes / GIB:>9.2f}   two steps",
        "",
        "Bytes of tensors in blocks of 512; not in it: cuBLAS workspaces (2 × 8 MiB, on Hopper 2 × 32 MiB),",
        "memory the allocator reserves beyond, the context of the process.",
    ]
    return "\n".join(lines)


def layout_lines(rehearsal: Rehearsal) -> list[str]:
    """What is divided over ranks, and what had to be assumed of the others."""
    alone = rehearsal.layout == "1 rank"
    where = "one process: nothing is divided over GPUs" if alone else f"rank 0 of {rehearsal.layout}"
    return [where, *(f"assumed: {what}" for what in rehearsal.assumed)]


def short(text: str, width: int) -> str:
    """The text, with its middle cut out where it is longer than `width`."""
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
