"""Job: everything about a training run that decides its memory and its time, whatever tool runs it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gatewright.spec.shape import ModelShape, TensorGroup, TensorRole

Method = Literal["full", "lora", "qlora"]
Storage = Literal["fp32", "bf16", "fp8", "mxfp8", "int8", "mxfp4", "nvfp4", "nf4", "nf4_double", "int4"]
Checkpointing = Literal["none", "per_op", "alternate", "full"]
"""per_op keeps the outputs of matrix products (torchtitan's selective), alternate recomputes every second layer."""
AttentionKernel = Literal["eager", "sdpa", "flash"]
LossKernel = Literal["full", "fused", "chunked", "linear"]
"""full: logits in fp32; fused: one kernel that reuses the logits; chunked: the softmax in pieces, logits whole;
linear: fused with the head, no logits kept."""
Optimizer = Literal["adamw", "adamw_8bit", "adamw_4bit", "muon", "sgd"]
"""Paged variants are written as the same optimizer with its state offloaded."""
Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "pipeline_naive"]
"""How data-parallel ranks share the states. pipeline_naive: layers spread over GPUs of one process (device_map)."""
Offload = Literal["weights", "optimizer", "activations", "experts"]

BYTES_PER_WEIGHT: dict[Storage, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0 + 4 / 128**2,  # one fp32 scale a 128 × 128 block
    "mxfp8": 1.0 + 1 / 32,  # one e8m0 scale every 32
    "int8": 1.0,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,  # one e4m3 scale every 16
    "nf4": 0.5 + 4 / 64,  # one fp32 absmax every 64
    "nf4_double": 0.5 + 1 / 64 + 4 / (64 * 256),  # absmax in 8 bits, an fp32 scale every 256 of them
    "int4": 0.5 + 2 / 128 + 0.5 / 128,  # GPTQ/AWQ: fp16 scale and 4-bit zero every 128
}
"""Bytes of one stored weight with its scales (bitsandbytes, GPTQ, OCP MX and NVFP4 block formats)."""


WORST_RANK = ((4, 1.15), (8, 1.25), (16, 1.55))
"""EP size, up to which, to tokens of the busiest rank over the mean, with experts in order. OLMoE-1B-7B on Tulu 3, from
its published counts: 1.25 at 8, 1.56 at 16 (c4 1.16, github 1.57, arxiv 1.66 at 8, which the interval of MoE holds). At
4 and less it was not measured, and above 16 neither, which takes the last."""


def worst_rank(ep: int) -> float:
    """Tokens of the busiest of `ep` expert ranks over the mean."""
    return next((share for size, share in WORST_RANK if ep <= size), WORST_RANK[-1][1]) if ep > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank updates: A [r, in] and B [out, r] beside each targeted matrix."""

    rank: int
    roles: frozenset[TensorRole]
    names: frozenset[str] | None = None
    """Leaf names within the roles; None: every module of them."""
    partly: frozenset[TensorRole] = frozenset()
    """Roles of which only the modules named in `shares` are adapted."""
    shares: Mapping[tuple[TensorRole, str], float] = field(default_factory=dict)
    """By role and leaf name: the part of those modules (or of their experts) that is adapted; absent: all."""
    full: frozenset[TensorRole] = frozenset()
    """Roles whose weights train in full beside the adapter."""
    chosen: tuple[tuple[int, ...], ...] = ()
    """Numbers of the experts that are adapted, of each layer that has any; empty: all, or not known yet."""
    dropout: bool = False

    def busiest(self, *, ep: int, experts: int) -> float:
        """Adapted experts of the rank with the most of them over the mean, where `ep` ranks hold them in order."""
        ranks = Counter(number * ep // experts for layer in self.chosen for number in layer)
        return max(ranks.values()) * ep / ranks.total() if ranks else 1.0

    def share(self, role: TensorRole, name: str) -> float:
        """Part of the modules of this role and leaf name that is adapted, 0 to 1."""
        if role not in self.roles or (self.names is not None and name not in self.names):
            return 0.0
        return self.shares.get((role, name), 0.0 if role in self.partly else 1.0)

    def parameters(self, group: TensorGroup, *, hidden: int, vocab: int) -> float:
        """Of the adapter on one tensor group. Embeddings take one as wide as the vocabulary."""
        if group.role not in self.roles:
            return 0.0
        if group.role == "embedding":
            return self.share("embedding", "embed_tokens") * self.rank * (vocab + hidden)
        return sum(
            self.share(group.role, linear.name) * linear.lora_parameters(self.rank)
            for linear in group.linears
            if linear.module or group.role == "router"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel groups; data parallelism takes what is left of the ranks."""

    ranks: int = 1
    sharding: Sharding = "none"
    tp: int = 1
    sequence_parallel: bool = False
    """Norms and residuals split over the TP ranks along the sequence."""
    ep: int = 1
    etp: int = 1
    """TP inside an expert."""
    pp: int = 1
    virtual_stages: int = 1
    """Model chunks on one pipeline rank (interleaved schedule)."""
    cp: int = 1
    shard_ranks: int | None = None
    """Ranks that share one copy of the states; None: all data-parallel ranks (and CP ranks)."""

    @property
    def dp(self) -> int:
        return max(1, self.ranks // (self.tp * self.pp * self.cp))

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO or FSDP divides what is not an expert."""
        if self.sharding in ("none", "pipeline_naive"):
            return 1
        return self.shard_ranks or self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO or FSDP divides the experts of one EP rank."""
        if self.sharding in ("none", "pipeline_naive"):
            return 1
        return max(1, self.shards * self.tp // (self.ep * self.etp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's training step, described without naming a tool's options."""

    shape: ModelShape
    method: Method
    framework: str = "gatewright"
    """Key of the policy table (catalog/frameworks.json)."""
    adapter: Adapter | None = None
    frozen: frozenset[TensorRole] = frozenset()
    """Roles that do not train in full fine-tuning."""
    storage: Storage = "bf16"
    """Of the matrices that do not train; full fine-tuning takes its types from the policy."""
    expert_storage: Storage | None = None
    """Of the routed experts where it differs: DeepSeek-V4 ships them in mxfp4 beside fp8; a plain bitsandbytes load
    reaches linear modules only and leaves fused experts in bf16."""
    stored: Mapping[TensorRole, float] = field(default_factory=dict)
    """Bytes a parameter by role, scales included, where the checkpoint's own files say it."""
    rows: int = 1
    tokens_per_row: int = 4096
    """Length of one row of the micro-batch, before CP divides it."""
    token_range: tuple[int, int] | None = None
    """Shortest and longest row to expect where tokens_per_row is only likely: unpacked data under a cap."""
    attention_tokens: int | None = None
    """Length of one document where packing isolates documents; None: the row."""
    checkpointing: Checkpointing = "full"
    recompute: frozenset[str] = frozenset()
    """Parts of a layer recomputed without checkpointing the whole: Megatron's names (layernorm, mlp, moe, moe_act,
    mla_up_proj)."""
    attention: AttentionKernel = "flash"
    loss: LossKernel = "full"
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at one time where the loss is linear; None: the policy's own number."""
    optimizer: Optimizer = "adamw"
    accumulate: bool = False
    """More than one micro-batch a step: gradients live through the forward pass."""
    step_in_backward: bool = False
    """Each gradient is used and freed as soon as it exists."""
    compiled: bool = False
    """torch.compile: pointwise operations are fused and recomputed, so only what matrix products need is kept."""
    layout: Layout = field(default_factory=Layout)
    offload: frozenset[Offload] = frozenset()
    reference_model: bool = False
    """DPO and kin with full fine-tuning keep a second, frozen copy."""
    preference: bool = False
    """Chosen and rejected rows go through together: two rows a sample."""
    distillation: bool = False
    """A teacher's logits stand beside the student's at the loss."""
    imbalance: float | None = None
    """Tokens of the busiest expert rank over the mean; None: by the size of EP, as overload says."""

    def trains(self, role: TensorRole) -> bool:
        """Whether the weights of the role themselves train."""
        if self.method == "full":
            return role not in self.frozen
        return self.adapter is not None and role in self.adapter.full

    def storage_of(self, role: TensorRole) -> Storage:
        """How the matrices of this role are stored in a block that does not train."""
        return self.expert_storage or self.storage if role == "routed_experts" else self.storage

    @property
    def overload(self) -> float:
        """Tokens of the busiest expert rank over the mean."""
        if self.imbalance is not None or self.layout.ep == 1:
            return self.imbalance or 1.0
        return worst_rank(self.layout.ep)

    @property
    def row_tokens(self) -> int:
        """Tokens of one row on one rank."""
        return -(-self.tokens_per_row // self.layout.cp)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.rows * (2 if self.preference else 1) * self.row_tokens
