"""Policies: what each training framework decides for you (types, kernels, buffers, allocator), as data with sources."""

import difflib
import functools
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gatewright.planner.job import Job
from gatewright.spec.errors import UserError

TABLE = Path(__file__).parent.parent / "catalog" / "frameworks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Bytes of each state of one trained parameter."""

    weight: float = 2
    grad: float = 2
    master: float = 0
    """fp32 copy of the weight that the optimizer updates; 0 where the weight itself is updated."""
    moment: float = 2
    """Each of Adam's two."""
    step: float = 0
    """Temporaries of the whole parameter set during the optimizer step (foreach kernels)."""
    grad_persists: bool = False
    """Gradient buffers are allocated once and live through the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One row of catalog/frameworks.json, with what it inherits filled in."""

    key: str
    title: str
    source: str
    full: Types = field(default_factory=Types)
    sharded: dict[str, Types] = field(default_factory=dict)
    """Types where an engine decides them: full_fsdp, full_zero, adapter_zero (DeepSpeed keeps fp32 masters)."""
    adapter: Types = field(default_factory=lambda: Types(weight=4, grad=4, moment=4))
    activation_bytes: int = 2
    norm: Literal["eager", "fused"] = "eager"
    mlp: Literal["eager", "fused"] = "eager"
    keeps_product: bool = True
    """A fused gated MLP still keeps the input of its down projection for the weight's gradient."""
    fp32_residual_with_4bit: bool = False
    """prepare_model_for_kbit_training: norms and embeddings in fp32, so the residual stream is too (not under FSDP)."""
    double_quant: bool = False
    """4-bit scales are themselves stored in 8 bits."""
    plain_linears: tuple[str, ...] = ()
    """Linear modules in a block that stay in 16 bits whatever the others are stored in, by leaf name."""
    experts: Literal["grouped", "grouped-lean", "loop"] = "grouped"
    """grouped-lean: frozen experts keep their input and the up-projection alone, the backward pass makes the rest
    again. loop: one expert after another, so only one expert's gradients (and dequantised weights) live at a time."""
    biased_expert_families: tuple[str, ...] = ()
    """Families whose experts have biases or norms of their own, which grouped-lean does not cover."""
    alternate_from: int = 1
    """First block recomputed where every second one is."""
    bf16_logits_families: tuple[str, ...] = ()
    """Families whose logits are never cast to fp32 for the loss."""
    adapter_copies_input: bool = False
    """Each adapter casts its input, and keeps the copy."""
    adapter_input_bytes: int = 2
    repeats_kv_families: tuple[str, ...] = ()
    """Families whose keys and values are expanded to the query heads before the kernel."""
    attention_workspace_bytes: float = 4
    """FlashAttention accumulates the query's gradient in fp32."""
    attention_multiprocessors: int = 0
    """Of the GPU that FlashAttention's deterministic backward fills with sums of the query's gradient; 0: one sum."""
    score_kept_bytes: float = 6
    score_grad_bytes: float = 8
    combine_kept_copies: float = 1
    """Experts' outputs kept for the gradient of their routing weights; 0 where weights are applied inside."""
    loss_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes a logit of [tokens, vocab] at the loss, by loss kernel."""
    linear_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time where the head is fused with the loss."""
    linear_chunk_bytes: float = 8
    """Bytes a logit of that chunk."""
    linear_head_grad_bytes: float = 2
    """Of the head's gradient at its fullest: accumulated over the chunks, scaled and cast."""
    gathered_layers: float = 2
    """Blocks whose full weights are on the rank at one time (FSDP, ZeRO-3)."""
    root_released: bool = False
    """FSDP gathers the embedding and the head for their own use alone, not with each other nor across the loss."""
    packed_by_matrix: bool = False
    """Weights in few bits are gathered for one product at a time: a matrix, or the experts' stack of one."""
    fsdp_skips_experts: bool = False
    """Experts are divided by EP alone, FSDP leaves them whole."""
    gathers_as_held: bool = False
    """FSDP gathers what trains, and takes its gradients, in the types they are held in, not in the compute type."""
    saves_by_tensor: bool = False
    """A save gathers one tensor of an adapter at a time."""
    accumulates_unsharded: bool = False
    """Between micro-batches FSDP keeps gradients unsharded (no_sync)."""
    loads_whole_model: bool = False
    """FSDP ranks read the whole checkpoint onto the device before they keep their shard."""
    quantized_input_bytes: float = 0
    """Of each element of a 4-bit linear's input that it keeps though its weight is frozen."""
    unties_head: bool = False
    """Checkpoints with tied embeddings are loaded as two matrices."""
    kept_extra: float = 0
    """Bytes a block keeps beside what the operations here account for, in units of the hidden width."""
    frozen_fsdp_keeps_grads: bool = False
    """FSDP1 with frozen parameters keeps the gradient of every block's input to the end of the backward pass."""
    reduce_bytes: float = 4
    """Of a gradient on its way through reduce-scatter."""
    bucket_parameters: int = 0
    """Parameters of one communication bucket (DDP, DeepSpeed)."""
    buckets: int = 2
    reduction_parameters: int = 0
    """Parameters whose gradients one collective sums in float32 as they are made; a larger tensor is one by itself."""
    step_group_bytes: float = 0
    """fp32 gradients of one DeepSpeed sub-group (sub_group_size, 1e9 parameters) during the step."""
    transient_reserve: float = 0.1
    """Reserved beyond allocated, as a share of what comes and goes within a step."""
    sharded_reserve: float = 0.15
    """The same where FSDP or ZeRO-3 gathers and frees weights on the side."""
    reserved_loss_bytes: float = 0
    """Reserved a logit when the logits are materialised; what the loss allocates lies within."""
    margin: float = 0.0
    """Added to the estimate so that it holds four runs of five."""
    margin_moe: float = 0.0
    reserved_margin: float = 0.0
    reserved_margin_moe: float = 0.0
    resident_reserve: float = 0.02
    """Reserved beyond allocated, as a share of what stays."""
    reserves_grads: bool = False
    """The last step's gradients leave segments that the larger activations cannot use."""
    context_bytes: int = 550_000_000
    communicator_bytes: int = 400_000_000
    interval: tuple[float, float] = (0.9, 1.15)
    """Low and high, as shares of the estimate."""
    interval_moe: tuple[float, float] = (0.8, 1.3)
    reserve_slack: float = 0.1
    """Added to the high end where the metric is reserved or device."""
    aliases: tuple[str, ...] = ()

    def residual_bytes(self, job: Job) -> int:
        upcast = job.method == "qlora" and self.fp32_residual_with_4bit and job.layout.shards == 1
        return 4 if upcast else self.activation_bytes

    def norm_style(self, job: Job) -> str:
        return "fused" if job.compiled else self.norm

    def mlp_style(self, job: Job) -> str:
        return "fused" if job.compiled else self.mlp

    def trained(self, job: Job) -> Types:
        """Types of the parameters that this job trains."""
        kind = "full" if job.method == "full" else "adapter"
        engine = {"fsdp1": "fsdp", "fsdp2": "fsdp", "zero1": "zero", "zero2": "zero", "zero3": "zero"}
        types = self.sharded.get(f"{kind}_{engine.get(job.layout.sharding, 'none')}")
        return types or (self.full if kind == "full" else self.adapter)

    def lean_experts(self, job: Job) -> bool:
        return self.experts == "grouped-lean" and job.shape.family not in self.biased_expert_families

    def repeats_kv(self, job: Job) -> bool:
        return "*" in self.repeats_kv_families or job.shape.family in self.repeats_kv_families

    def loss_bytes_per_logit(self, job: Job) -> float:
        if job.loss in ("full", "fused") and job.shape.family in self.bf16_logits_families:
            return self.loss_bytes[f"{job.loss}_bf16"]
        if job.compiled and job.loss == "full":
            return self.loss_bytes.get("full_compiled", self.loss_bytes["full"])
        return self.loss_bytes[job.loss]


TUPLES = {item.name for item in fields(Policy) if "tuple" in str(item.type)}


@functools.cache
def read_policies() -> dict[str, Policy]:
    """The table, by key, inheritance resolved."""
    rows: dict[str, dict[str, Any]] = json.loads(TABLE.read_bytes())
    return {key: build(key, rows) for key in rows}


def build(key: str, rows: dict[str, dict[str, Any]]) -> Policy:
    values = inherited(key, rows)
    known = {item.name for item in fields(Policy)}
    arguments: dict[str, Any] = {name: value for name, value in values.items() if name in known}
    for name in ("full", "adapter"):
        if name in arguments:
            arguments[name] = Types(**arguments[name])
    arguments["sharded"] = {name: Types(**types) for name, types in arguments.get("sharded", {}).items()}
    for name in TUPLES.intersection(arguments):
        arguments[name] = tuple(arguments[name])
    return Policy(key=key, **arguments)


def inherited(key: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row over the row it inherits from; dictionaries are merged key by key."""
    row = rows[key]
    base = inherited(row["inherits"], rows) if "inherits" in row else {}
    base.pop("aliases", None)
    merged = {**base, **row}
    for name, value in row.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            merged[name] = {**base[name], **value}
    return merged


def find_policy(name: str) -> Policy:
    """The policy of a framework, by key or alias.

    Raises UserError that names the nearest one known.
    """
    policies = read_policies()
    for policy in policies.values():
        if name == policy.key or name in policy.aliases:
            return policy
    near = difflib.get_close_matches(name, list(policies), n=1, cutoff=0.0)
    known = ", ".join(policies)
    raise UserError(f"unknown framework {name!r}. Nearest known: {near[0]!r}. Known: {known}.")
