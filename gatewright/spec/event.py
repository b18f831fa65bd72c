"""Events: the lines of a run's events.jsonl, append-only; the trainer writes them, report and doctor read them.

Every line is one JSON object with `v` (this format's version), `time` (UTC, ISO 8601) and `kind`; the other
fields are those of the dataclass of that kind. A reader skips kinds and fields it does not know.
"""

from dataclasses import dataclass, field

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
    best: bool


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
    """finished, interrupted or failed."""
    detail: str


Event = Start | ModelLoaded | DataLoaded | StepDone | Evaluated | Saved | Finding | Stop

KINDS: dict[str, type[Event]] = {
    "start": Start,
    "model": ModelLoaded,
    "data": DataLoaded,
    "step": StepDone,
    "evaluate": Evaluated,
    "save": Saved,
    "finding": Finding,
    "stop": Stop,
}
