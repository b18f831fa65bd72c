"""Search: every layout of a number of GPUs, judged by the rules, the memory, the clock and the price."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from gatewright.planner.cost import estimate_cost
from gatewright.planner.job import Job, Layout, Sharding
from gatewright.planner.legal import advice, refusals
from gatewright.planner.legal_rule import Backend, Setting
from gatewright.planner.memory import estimate_memory
from gatewright.planner.memory_states import shares, states
from gatewright.planner.policy import find_policy
from gatewright.planner.time import Efficiency, estimate_time
from gatewright.planner.weights import StoredWeights
from gatewright.spec.hardware import GIB, Cluster, Gpu, Node
from gatewright.spec.plan import PHASE_TITLES, Candidate, MemoryEstimate

USABLE = 0.98
"""Share of the device's memory that an estimate may fill; the rest is for what the driver and other processes take."""
DEFAULT_MICRO_BATCHES = 16
"""Of a step whose tokens are not given."""
RankBy = Literal["time", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan: a job whose layout is open, on GPUs of one kind."""

    job: Job
    """Its layout is ignored unless `layout` fixes it."""
    gpu: Gpu
    per_node: int
    tokens_per_step: int | None = None
    """None: a micro-batch for every rank, and at least DEFAULT_MICRO_BATCHES."""
    tokens_open: bool = False
    """The micro-batch's tokens were not given: fewer will do where that takes fewer GPUs."""
    backend: Backend = "gatewright"
    layout: Layout | None = None
    """Fixed by the user; None: all are tried."""
    hours: float | None = None
    """Length of the run, where it is given in hours."""
    steps: int | None = None
    usd_per_gpu_hour: float | None = None
    efficiency: Efficiency | None = None
    weights: StoredWeights | None = None
    """What the checkpoint's files hold, where they are there."""
    rank_by: RankBy = "time"

    @property
    def capacity_bytes(self) -> int:
        return int(self.gpu.memory_bytes * USABLE)

    @property
    def micro_batch_tokens(self) -> int:
        """Before CP divides its rows."""
        return replace(self.job, layout=Layout()).micro_batch_tokens

    def step_tokens(self, gpus: int) -> int:
        return self.tokens_per_step or self.micro_batch_tokens * max(DEFAULT_MICRO_BATCHES, gpus)

    def cluster(self, gpus: int) -> Cluster:
        per_node = min(gpus, self.per_node)
        return Cluster(node=Node(gpu=self.gpu, gpus=per_node), nodes=-(-gpus // per_node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Candidates of one number of GPUs, best first within each group."""

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    illegal: tuple[Candidate, ...]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """By the text of a candidate."""

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None


def search(question: Question, *, gpus: int) -> Found:
    """Every layout of `gpus` GPUs that the backend knows, judged."""
    layouts = [question.layout] if question.layout else list(layouts_of(question, gpus))
    judged = [judge(question, layout) for layout in layouts]
    by_text = {item.layout: layout for item, layout in zip(judged, layouts, strict=True)}
    fitting = [item for item in judged if item.fits]
    too_large = [item for item in judged if not item.fits and not item.refusals]
    return Found(
        fitting=tuple(sorted(fitting, key=lambda item: rank(item, by_text[item.layout], question))),
        too_large=tuple(sorted(too_large, key=device_bytes)),
        illegal=tuple(item for item in judged if item.refusals),
        layouts=by_text,
    )


def rank(candidate: Candidate, layout: Layout, question: Question) -> tuple[bool, float, int, int]:
    """Those whose whole interval fits before the tight ones; then seconds or dollars a token; then CP; then bytes.

    Times that agree in two digits are a tie. CP is taken where it is faster, or where nothing else fits: it is
    counted for rows of one document, and in packed rows there is less to divide.
    """
    assert candidate.time is not None and candidate.memory is not None
    tight = candidate.memory.device.high_bytes > question.gpu.memory_bytes
    per_token = candidate.time.step_s / candidate.time.tokens_per_step
    if question.rank_by == "cost":
        per_token *= candidate.time.gpus
    return (tight, float(f"{per_token:.1e}"), layout.cp, device_bytes(candidate))


def device_bytes(candidate: Candidate) -> int:
    return candidate.memory.device.bytes if candidate.memory else 0


def fewest_gpus(question: Question, *, most: int) -> tuple[int | None, Found]:
    """The smallest number of GPUs that fits, up to `most`, and what was found there (or at `most`)."""
    found = Found(fitting=(), too_large=(), illegal=())
    least = stored_bytes(question.job)
    for gpus in sizes(question.per_node, most):
        if least / gpus > question.capacity_bytes and gpus < most:
            continue  # the weights alone exceed that many GPUs
        found = search(question, gpus=gpus)
        if found.fitting:
            return gpus, found
    return None, found


def stored_bytes(job: Job) -> float:
    """Weights and optimizer state on one GPU, were it large enough."""
    policy = find_policy(job.framework)
    alone = replace(job, layout=Layout())
    own = states(alone, policy, shares(alone, policy, 0))
    return own.frozen_weights + own.trained_weights + own.adapters + own.optimizer


def sizes(per_node: int, most: int) -> list[int]:
    """Every number within a node, then whole nodes: 1, 2, 3 …, 4, 6, 8, 12, 16 … nodes."""
    nodes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    numbers = {*range(1, per_node + 1), *(count * per_node for count in nodes), most}
    return sorted(number for number in numbers if number <= most)


def layouts_of(question: Question, gpus: int) -> Iterator[Layout]:
    """Group sizes that a backend offers; the rules judge them afterwards."""
    experts = question.job.shape.experts
    for tp, pp in tensor_and_pipeline(question, gpus):
        stage = gpus // (tp * pp)
        for cp in powers_of_two(stage):
            for ep in expert_sizes(stage * tp, experts):
                for sharding in shardings(question.backend, stage):
                    yield Layout(
                        ranks=gpus,
                        sharding=sharding,
                        tp=tp,
                        sequence_parallel=tp > 1,
                        pp=pp,
                        cp=cp,
                        ep=ep,
                    )


def tensor_and_pipeline(question: Question, gpus: int) -> Iterator[tuple[int, int]]:
    if question.backend != "megatron":
        yield 1, 1
        return
    for tp in powers_of_two(min(gpus, question.per_node)):
        for pp in powers_of_two(gpus // tp):
            if gpus % (tp * pp) == 0:
                yield tp, pp


def expert_sizes(ranks: int, experts: int) -> list[int]:
    """Sizes that divide both the ranks and the experts."""
    both = [size for size in range(2, ranks + 1) if ranks % size == 0 and experts % size == 0] if experts else []
    return [1, *both]


def shardings(backend: Backend, ranks: int) -> tuple[Sharding, ...]:
    if backend == "megatron":
        return ("zero1",)
    if ranks == 1:
        return ("none",)
    full: Sharding = "zero3" if backend.startswith("deepspeed") else "fsdp1" if backend == "fsdp1" else "fsdp2"
    return ("none", "zero2", full)


@cache
def powers_of_two(most: int) -> tuple[int, ...]:
    return tuple(1 << bits for bits in range(max(1, most).bit_length()))


def micro_batches_of(question: Question, layout: Layout) -> int:
    """Of one step, on one data-parallel rank."""
    return question.step_tokens(layout.ranks) // (layout.dp * question.micro_batch_tokens)


def as_judged(question: Question, layout: Layout) -> Job:
    """The question's job in this layout."""
    accumulate = question.job.accumulate or micro_batches_of(question, layout) > 1
    return replace(question.job, layout=layout, accumulate=accumulate)


def judge(question: Question, layout: Layout) -> Candidate:
    """Rules first, then bytes, then seconds and dollars."""
    cluster = question.cluster(layout.ranks)
    job = as_judged(question, layout)
    step_tokens, micro_batches = question.step_tokens(layout.ranks), micro_batches_of(question, layout)
    setting = Setting(job=job, cluster=cluster, backend=question.backend, micro_batches=micro_batches)
    broken = refusals(setting)
    text = describe(layout, gpu=question.gpu)
    if broken:
        return Candidate(layout=text, memory=None, time=None, cost=None, fits=False, refusals=broken)
    memory = estimate_memory(job)
    if memory.device.bytes > question.capacity_bytes:
        over = (memory.device.bytes - question.capacity_bytes) / GIB
        reason = (
            f"{memory.device.bytes / GIB:.1f} GiB at the {PHASE_TITLES[memory.peak.name]}, {over:.1f} too many: "
            f"{largest(memory)}"
        )
        return Candidate(layout=text, memory=memory, time=None, cost=None, fits=False, reasons=(reason,))
    time = estimate_time(job, cluster, tokens_per_step=step_tokens, efficiency=question.efficiency)
    hours = question.hours or (question.steps or 0) * time.step_s / 3600
    cost = None
    if hours > 0:
        cost = estimate_cost(question.gpu, gpus=layout.ranks, hours=hours, usd_per_gpu_hour=question.usd_per_gpu_hour)
    return Candidate(
        layout=text,
        memory=memory,
        time=time,
        cost=cost,
        fits=True,
        reasons=(*why(job, cluster), *(item.reason for item in advice(setting))),
    )


def largest(memory: MemoryEstimate) -> str:
    """The two largest parts of the peak."""
    parts = sorted(memory.peak.parts, key=lambda part: -part.bytes)[:2]
    return ", ".join(f"{part.name} {part.bytes / GIB:.1f} GiB" for part in parts)


def describe(layout: Layout, *, gpu: Gpu) -> str:
    """`8 × h200: ep 8, dp 8 zero2`: sizes of 1 are left out."""
    sizes_text = [
        f"{name} {size}"
        for name, size in (("ep", layout.ep), ("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp))
        if size > 1
    ]
    shared = {"none": "", "fsdp2": " fsdp2", "fsdp1": " fsdp1"}.get(layout.sharding, f" {layout.sharding}")
    if layout.dp > 1:
        sizes_text.append(f"dp {layout.dp}{shared or ' replicated'}")
    elif shared and layout.ranks > 1:
        sizes_text.append(shared.strip())
    return f"{layout.ranks} × {gpu.name}" + (f": {', '.join(sizes_text)}" if sizes_text else "")


def why(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """The reason of each dimension that is used."""
    layout, reasons = job.layout, []
    if layout.ep > 1:
        experts = sum(group.parameters for group in job.shape.groups if group.role == "routed_experts")
        share, own = experts / job.shape.parameters, job.shape.experts // layout.ep
        reasons.append(
            f"ep {layout.ep}: experts are {share:.0%} of the parameters; a rank owns {own} of {job.shape.experts}"
        )
    if layout.sharding == "zero2":
        reasons.append("zero2: gradients and optimizer state are divided, weights outside the experts are replicated")
    if layout.sharding in ("zero3", "fsdp1", "fsdp2"):
        reasons.append(f"{layout.sharding}: weights are divided too, and gathered block by block")
    if layout.cp > 1:
        reasons.append(f"cp {layout.cp}: a row of {job.tokens_per_row:,} tokens is {job.row_tokens:,} a rank")
    if layout.tp > 1:
        reasons.append(f"tp {layout.tp}: matrices are divided within a node of {cluster.node.gpus}")
    if layout.pp > 1:
        reasons.append(f"pp {layout.pp}: {len(job.shape.layers)} layers in {layout.pp} stages")
    return tuple(reasons)
