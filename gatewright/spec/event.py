"""Events: the lines of a run's events.jsonl, append-only; the trainer writes them, report and doctor read them.

Every line is one JSON object with `v` (this format's version), `time` (UTC, ISO 8601) and `kind`; the other
fields are those of the dataclass of that kind. A reader skips kinds and fields it does not know.
"""

from dataclasses import dataclass, field
from statistics import median

EVENT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A process began to work on the run."""

    run: str
    versions: dict[str, str]
    """gatewright, python, torch, transformers, peft."""
    device: str
    threads: int
    resumed_step: int | None
    """Last step of the checkpoint it continues from; step events after it, written earlier, are void."""
    steps: int
    """Optimizer steps of the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChosen:
    """How a run is spread over its ranks; written by runs on many."""

    ranks: int
    layout: str
    """In words: `8 ranks: ep 8, zero2`."""
    reason: str
    """As the run file says, or why the planner chose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded:
    path: str
    architecture: str
    dtype: str
    parameters: int
    trainable_parameters: int
    layers: int
    moe_layers: list[int]
    """Layer index of each row of StepDone.expert_tokens."""
    experts: int
    """Routed experts in each MoE layer; 0 for a dense model."""
    top_k: int
    attention: str
    """Kernel that honours the document boundaries, in words."""
    experts_kernel: str
    coverage: list[dict[str, int | str | bool]]
    """One row a role: role, trains, modules, parameters, trainable_parameters, rank (0: none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaded:
    split: str
    """train or evaluate."""
    source: str
    documents: int
    tokens: int
    target_tokens: int
    """Tokens that carry loss."""
    max_tokens: int
    overlong: str
    overlong_documents: int
    tokens_lost: int
    """By truncating, splitting (targets at a cut) or dropping."""
    packs: int
    """Micro-batches in one pass over the data."""
    capacity_tokens: int
    """Tokens a micro-batch can hold."""
    fill: float
    """tokens / (packs × capacity_tokens)."""
    lower_bound_packs: int
    """No packing can use fewer."""
    padded_fill: float
    """The same share if as many documents a batch were padded to their longest, in random order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    step: int
    """Counted from 1."""
    loss: float
    """Mean cross-entropy over target tokens, nats."""
    lr: float
    grad_norm: float
    """Global L2 norm before clipping."""
    tokens: int
    target_tokens: int
    micro_batches: int
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    memory_bytes: int
    """Peak so far: allocated on a GPU, resident set of the process on a CPU."""
    dropped_tokens: int
    expert_tokens: list[list[int]] = field(default_factory=list)
    """[MoE layer][expert] assignments the router really made in this step; empty for a dense model."""
    dropped_by_layer: list[int] = field(default_factory=list)
    """Assignments dropped in each MoE layer for want of capacity; empty where nothing can be dropped."""
    balance_loss: float | None = None
    """Mean over layers of E·Σ f·P (1 when balanced), before its weight; None where it is not computed."""
    z_loss: float | None = None
    """Mean over layers and tokens of logsumexp(logits)², before its weight; None where it is not computed."""
    data_step: int | None = None
    """Whose data it took, counted from 0: step - 1, more after a rollback that skipped some."""
    rank_step_s: list[float] = field(default_factory=list)
    """step_s of each rank; empty for one process."""
    rank_memory_bytes: list[int] = field(default_factory=list)
    """memory_bytes of each rank; empty for one process."""
    reserved_bytes: int = 0
    """Peak so far of what the allocator has taken from the GPU; 0 on a CPU."""
    rank_reserved_bytes: list[int] = field(default_factory=list)
    """reserved_bytes of each rank; empty for one process."""
    rank_data_s: list[float] = field(default_factory=list)
    """data_s of each rank; empty for one process."""
    rank_wait_s: list[float] = field(default_factory=list)
    """Part of step_s that each rank spent in collectives, transfers and waiting for others; empty for one process."""
    mfu: float | None = None
    """Model FLOPs over what all devices could have done in step_s; None where a rate or the model is not known."""
    router_lr: float | None = None
    """Learning rate of the router; None where it is frozen."""
    exchanges: dict[str, int] = field(default_factory=dict)
    """Micro-batches by the exchange they made, such as `heads over 2`; `whole`: no document cut. Empty without CP."""

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s_rank(self) -> float:
        return self.tokens_per_s / max(1, len(self.rank_step_s))

    @property
    def spread(self) -> float | None:
        """The slowest rank's own work over the median: step_s without what was spent in collectives.

        None for one process. The steps themselves are as long as the slowest on every rank, which the others wait for.
        """
        if not self.rank_wait_s:
            return None
        work_s = [step_s - wait_s for step_s, wait_s in zip(self.rank_step_s, self.rank_wait_s, strict=True)]
        return max(work_s) / median(work_s) if median(work_s) > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    step: int
    """0: before training."""
    loss: float
    target_tokens: int
    asked: int
    """Rows answered by greedy decoding; 0 where exact match is off."""
    correct: int
    samples: list[dict[str, str]]
    """A few rows: prompt, expected, answer."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    step: int
    path: str
    bytes: int
    seconds: float
    """From the copy of the state to the complete checkpoint."""
    best: bool
    stall_s: float | None = None
    """How long the steps waited for it; None, in older logs: all the time."""

    @property
    def waited_s(self) -> float:
        return self.seconds if self.stall_s is None else self.stall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterHealth:
    """The router on the fixed probe batch; each list has one value a MoE layer."""

    step: int
    """0: before training."""
    tokens: int
    """Tokens of the probe batch, over all ranks."""
    load_cv: list[float]
    """Standard deviation of expert load over its mean."""
    max_violation: list[float]
    """Load of the busiest expert over the fair share, minus 1 (MaxVio)."""
    effective_experts: list[float]
    """exp(entropy of load) / experts."""
    dead: list[int]
    """Experts without a token."""
    starved: list[int]
    """Experts with less than a tenth of the fair share, the dead among them."""
    token_entropy: list[float]
    """Mean entropy of a token's routing probabilities over ln(experts)."""
    top1: list[float]
    """Mean largest routing probability."""
    margin: list[float]
    """Mean difference between the last chosen and the first rejected probability."""
    lse2: list[float]
    """Mean logsumexp(logits)²."""
    drift: list[float]
    """Norm of the router weight's change since step 0 over the norm at step 0."""
    overlap: list[float]
    """Mean share of top-k choices equal to those of step 0."""
    kl: list[float]
    """Mean KL divergence from step 0's routing probabilities, nats."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardActed:
    """The guard saw the router fall ill, and did something about it."""

    step: int
    level: str
    """yellow, orange or red."""
    reasons: list[str]
    """Each with its numbers: what was measured, at which layer, against which threshold and value at step 0."""
    action: str
    """One of router.guard.action, or none when the list is used up or holds nothing for this level."""
    detail: str
    """What changed, in numbers."""
    resumed_step: int | None = None
    """After a rollback: last step of the checkpoint it went back to; step events after it, written before, are void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something the user should know: shown on screen and in the report."""

    severity: str
    """error, warning or note."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    step: int
    reason: str
    """finished, interrupted (saved, and may go on), hopeless (the gate said no) or failed."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeProved:
    """A checkpoint was loaded, and the moment it was made was computed again."""

    step: int
    loss_then: float
    """Of the last step's first micro-batch, by the weights that were saved."""
    loss_now: float
    tolerance: float
    """Largest relative difference that was allowed."""
    lr_then: float
    lr_now: float
    same_data: bool
    """The last step's tokens and labels are those it was trained on."""
    same_rng: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChecked:
    """The end of the run was predicted, and compared with the time that its links have."""

    step: int
    steps: int
    step_s: float
    """Median of this process's steps after the first five."""
    evaluate_s: float
    save_s: float
    """The last evaluation, and the longest wait of steps for a save; 0 where there was none."""
    needed_s: float
    left_s: float
    """This link's rest, and what the links that may follow have between their start and their last save."""
    link_s: float
    """What one further link has."""
    hopeless: bool


Event = (
    Start
    | LayoutChosen
    | ModelLoaded
    | DataLoaded
    | StepDone
    | Evaluated
    | Saved
    | RouterHealth
    | GuardActed
    | Finding
    | ResumeProved
    | GateChecked
    | Stop
)

KINDS: dict[str, type[Event]] = {
    "start": Start,
    "layout": LayoutChosen,
    "model": ModelLoaded,
    "data": DataLoaded,
    "step": StepDone,
    "evaluate": Evaluated,
    "save": Saved,
    "router_health": RouterHealth,
    "guard": GuardActed,
    "finding": Finding,
    "resume": ResumeProved,
    "gate": GateChecked,
    "stop": Stop,
}
