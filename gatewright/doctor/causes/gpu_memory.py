"""GPU memory: one failed allocation, told apart by its numbers and by the phase it fell into."""

from gatewright.doctor.cause import Cause, Log, Role, Seen, Sighting, env, plain_finding, sign
from gatewright.doctor.causes.gpu_memory_pages import LESS, PAGES
from gatewright.doctor.knobs import knobs
from gatewright.doctor.oom_cause import OomVerdict, judge_oom, others_bytes
from gatewright.doctor.oom_sentence import OomSentence, parse_oom
from gatewright.doctor.phase import phase_of
from gatewright.spec.finding import Change, Finding, Number


def out_of_memory(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """The finding for failed allocations: the first sentence with numbers is judged, the phase may override."""
    sighting, oom = _best(seen)
    phase = phase_of(sighting.before, sighting.line)
    ranks = {s.place.rank for s in seen.sightings if s.place.rank is not None}
    seen = Seen(sightings=(sighting, *(s for s in seen.sightings if s is not sighting)), **_rest(seen))
    if oom is None:
        page = _page_of_phase(phase, None) or cause
        when = f" in the phase {phase}" if phase else ""
        return plain_finding(
            page,
            seen,
            log,
            text=f"A GPU ran out of memory{when}; the log has no numbers to tell why.",
            numbers=(("phase", phase or "unknown"), ("cause", "unknown")),
            confidence="likely" if phase else "possible",
            changes=() if page is not cause else knobs(log.tool, "smaller_micro_batch", "recompute_activations"),
        )
    verdict = judge_oom(oom)
    page = _page_of_phase(phase, verdict) or PAGES[f"oom-{_PAGE_OF.get(verdict.cause, 'pressure')}"]
    return plain_finding(
        page,
        seen,
        log,
        text=_sentence(oom, verdict, phase, ranks),
        numbers=tuple(_numbers(oom, verdict, phase)),
        confidence=verdict.confidence,
        fix=_fix(page, verdict, log),
        changes=_changes(page, verdict, phase, log),
    )


def masked(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """A library's own status for a full card."""
    return plain_finding(cause, seen, log, numbers=(("cause", "pressure"),))


_PAGE_OF = {
    "absurd_request": "absurd-request",
    "fraction_cap": "fraction-cap",
    "misreport": "misreport",
    "other_process": "other-process",
    "fragmentation": "fragmentation",
    "mixed": "pressure",
    "pressure": "pressure",
    "unknown": "pressure",
}
_PHASE_PAGE = {"resume": "oom-resume", "evaluate": "oom-evaluation", "save": "oom-save", "merge": "oom-merge"}
_STRONGER_THAN_PHASE = {"absurd_request", "fraction_cap", "misreport", "other_process"}
_PHASE_WORDS = {
    "load": "while the model was loaded",
    "forward": "in the forward pass",
    "loss": "at the loss",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "evaluate": "in evaluation",
    "save": "while saving",
    "resume": "while resuming",
    "merge": "while merging",
    "generate": "in generation",
}


def _rest(seen: Seen) -> dict[str, int]:
    return {"occurrences": seen.occurrences, "last_line": seen.last_line}


def _best(seen: Seen) -> tuple[Sighting, OomSentence | None]:
    """The earliest sighting whose sentence has a card's numbers, else one with any, else the first."""
    read = [(s, parse_oom("\n".join((s.line, *s.after)))) for s in seen.sightings]
    whole = [(s, oom) for s, oom in read if oom is not None and oom.total_bytes is not None]
    some = [(s, oom) for s, oom in read if oom is not None]
    return (whole or some or read)[0]


def _page_of_phase(phase: str, verdict: OomVerdict | None) -> Cause | None:
    if phase not in _PHASE_PAGE or (verdict is not None and verdict.cause in _STRONGER_THAN_PHASE):
        return None
    return PAGES[_PHASE_PAGE[phase]]


def _sentence(oom: OomSentence, verdict: OomVerdict, phase: str, ranks: set[int]) -> str:
    gpu = f"GPU {oom.gpu}" if oom.gpu is not None else "A GPU"
    who = f" of rank {min(ranks)}" if len(ranks) == 1 else f" (first of {len(ranks)} ranks)" if ranks else ""
    when = f" {_PHASE_WORDS[phase]}" if phase else ""
    return f"{gpu}{who} ran out of memory{when}: {verdict.reason}."


def _numbers(oom: OomSentence, verdict: OomVerdict, phase: str) -> list[tuple[str, Number]]:
    values = (
        ("tried_bytes", oom.tried_bytes),
        ("total_bytes", oom.total_bytes),
        ("free_bytes", oom.free_bytes),
        ("allocated_bytes", oom.allocated_bytes),
        ("unallocated_bytes", oom.unallocated_bytes),
        ("process_bytes", oom.process_bytes),
        ("allowed_bytes", oom.allowed_bytes),
        ("others_bytes", others_bytes(oom)),
        ("headroom_bytes", oom.headroom_bytes),
    )
    return [
        ("cause", verdict.cause),
        ("phase", phase or "unknown"),
        *((name, value) for name, value in values if value is not None),
    ]


def _fix(page: Cause, verdict: OomVerdict, log: Log) -> tuple[str, ...]:
    if page.name == "oom-fragmentation" and "alloc_conf_unsupported" in log.kinds:
        return (
            "Expandable segments cannot help here: the log says that this build does not support them.",
            "Fewer different shapes: packed batches of one size, or lengths rounded up.",
            LESS,
        )
    if verdict.cause == "mixed":
        return (*page.fix, "Some of it is fragmentation: fewer different shapes help as well.")
    return page.fix


def _changes(page: Cause, verdict: OomVerdict, phase: str, log: Log) -> tuple[Change, ...]:
    if page.name == "oom-fragmentation":
        less = knobs(log.tool, "smaller_micro_batch")
        if "alloc_conf_unsupported" in log.kinds:
            return less
        value = "expandable_segments:True"
        why = "PyTorch 2.9 and later; set the older names too, versions differ in which one they read"
        return (
            env("PYTORCH_ALLOC_CONF", value, why=why),
            env("PYTORCH_CUDA_ALLOC_CONF", value),
            env("PYTORCH_HIP_ALLOC_CONF", value),
        )
    if page.name == "oom-evaluation":
        return knobs(log.tool, "smaller_evaluation", "evaluation_to_host")
    if page.name == "oom-pressure" and phase not in {"load", "generate"}:
        return knobs(log.tool, "smaller_micro_batch", "shorter_samples", "recompute_activations")
    if page.name == "oom-absurd-request" and phase != "load":
        return knobs(log.tool, "shorter_samples")
    return ()


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW511",
        name="oom-without-numbers",
        kind="gpu_oom",
        title="Out of GPU memory, without numbers",
        signs=(
            sign("out of memory", pattern=r"(?:CUDA|HIP|XPU)(?: driver)?(?: error)?:? out of memory"),
            sign("OutOfMemoryError", pattern=r"\b(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b"),
            sign(
                "OUT_OF_DEVICE_MEMORY",
                "OUT_OF_RESOURCES",
                pattern=r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)",
            ),
            sign("hipErrorOutOfMemory", "cudaErrorMemoryAllocation"),
            sign("RESOURCE_EXHAUSTED", pattern=r"RESOURCE_EXHAUSTED: .*(?:OOM|[Oo]ut of memory)"),
        ),
        text="A GPU ran out of memory.",
        why="The device refused an allocation and the message carries no numbers: it did not come from "
        "PyTorch's caching "
        "allocator (a library, the driver, NCCL), or the log was cut.",
        fix=(LESS, "Print torch.cuda.memory_summary() when it happens, to learn which of the causes it is."),
        judge=out_of_memory,
        outranks=8,
        keep=8,
    ),
    Cause(
        code="GW512",
        name="oom-masked",
        kind="gpu_oom_masked",
        title="Out of GPU memory under another name",
        confidence="possible",
        signs=(
            sign("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "HIPBLAS_STATUS_ALLOC_FAILED"),
            sign("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_INITIALIZED", "rocblas_status_memory_error"),
            sign("CUBLAS_STATUS_INTERNAL_ERROR", "HIPBLAS_STATUS_NOT_INITIALIZED", "CUSOLVER_STATUS_ALLOC_FAILED"),
            sign("miopenStatusAllocFailed", "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", "MIOPEN_STATUS_ALLOC_FAILED"),
            sign("Cuda failure", "HIP failure", pattern=r"(?:Cuda|HIP) failure.*out of memory"),
        ),
        text=(
            "A GPU library could not get its workspace: most often the card is full, else a token id beyond "
            "the embedding."
        ),
        why="cuBLAS, cuDNN and NCCL allocate outside PyTorch's allocator. When PyTorch holds the whole card "
        "they fail with "
        "a status of their own. A device-side assertion (a token id out of range) can leave the same message.",
        fix=(
            "Leave the libraries 1–2 GiB: smaller micro-batch, or PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8.",
            "If memory is not full, run once with CUDA_LAUNCH_BLOCKING=1 and check that every token id is below the "
            "number of embedding rows.",
        ),
        judge=masked,
        outranks=3,
    ),
    Cause(
        code="GW520",
        name="expandable-segments-unsupported",
        kind="alloc_conf_unsupported",
        title="expandable_segments has no effect on this build",
        role=Role.HINT,
        severity="warning",
        confidence="certain",
        signs=(sign("expandable_segments not supported", "expandable_segments is not supported"),),
        text="This PyTorch build ignores expandable_segments: it says that the platform does not support them.",
        why="ROCm builds lack them unless they are recent, built for ROCm 7.0 or later; the setting is then "
        "accepted, a "
        "warning is printed once a rank, and nothing changes.",
        fix=(
            "Do not count on it: lower live memory, and use few different shapes.",
            "Or use a build that has them, and verify with the allocator's snapshot (is_expandable).",
        ),
        source="https://github.com/pytorch/pytorch/pull/179930",
    ),
    Cause(
        code="GW521",
        name="allocator-settings-syntax",
        kind="alloc_conf_syntax",
        title="The allocator settings cannot be parsed",
        confidence="certain",
        signs=(
            sign("Error parsing CachingAllocator settings"),
            sign(
                "CachingAllocator option",
                "allocator option",
                pattern=r"Unrecognized (?:\w*CachingAllocator|allocator) option",
            ),
            sign("Expected a single True/False argument", "ConfigTokenizer"),
            sign(
                "ALLOC_CONF=",
                "expandable_segments=",
                pattern=r"ALLOC_CONF=[\"']?\w+=|expandable_segments=(?:True|true)",
            ),
            sign("Unrecognized key", pattern=r"Unrecognized key '[^']*' in .*(?:AllocatorConfig|allocator)"),
            sign(
                "ALLOC_CONF",
                pattern=r"(?:Invalid|invalid|[Ee]rror|[Uu]nrecogni[sz]ed|[Mm]alformed).*PYTORCH_\w*ALLOC_CONF",
            ),
        ),
        text="PyTorch cannot parse its allocator settings.",
        why="The value is a list of `key:value`, comma-separated: a colon, not `=`. An option that this "
        "version does not "
        "know is refused as well (expandable_segments needs PyTorch 2.1).",
        fix=("Write it with a colon; unset it on PyTorch before 2.1.",),
        changes=(env("PYTORCH_ALLOC_CONF", "expandable_segments:True"),),
        outranks=4,
    ),
    Cause(
        code="GW522",
        name="allocator-settings-ineffective",
        kind="alloc_conf_ineffective",
        title="Allocator settings that came too late, or under a name that is not read",
        role=Role.HINT,
        severity="warning",
        signs=(
            sign(
                "ALLOC_CONF",
                pattern=r"PYTORCH_\w*ALLOC_CONF .*(?:after torch|no effect|ignored|already initiali[sz]ed|too late)",
            ),
            sign("allocator settings", pattern=r"allocator settings .*(?:no effect|ignored|already)"),
        ),
        text=(
            "The allocator settings were not in force: they were set after the allocator started, or under "
            "another name."
        ),
        why="They are read once, at the first allocation. Set in Python after importing torch they do "
        "nothing; PyTorch 2.9 "
        "renamed the variable, and one release read only the old name for expandable segments.",
        fix=("Set all three names to the same value in the launcher, and verify with the allocator's snapshot.",),
        changes=(
            env("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
            env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
            env("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True"),
        ),
        source="https://github.com/pytorch/pytorch/issues/183387",
    ),
)
