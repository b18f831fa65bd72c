"""ModelShape: what a language model is made of, in integers: its layers, its tensors by role, its linear modules."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

AttentionKind = Literal["full", "sliding", "chunked", "latent", "sparse_latent", "compressed", "linear"]
MlpKind = Literal["dense", "moe"]
TensorRole = Literal[
    "embedding",
    "attention",
    "linear_attention",
    "dense_mlp",
    "router",
    "routed_experts",
    "shared_experts",
    "norms",
    "residual",
    "head",
    "mtp",
    "vision",
]
ROLES: tuple[TensorRole, ...] = get_args(TensorRole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Token mixing of one layer: what its kernel sees and what it would cache."""

    kind: AttentionKind
    """full, sliding (window), chunked (no look across a chunk), latent (MLA), sparse_latent (MLA with a top-k
    indexer), compressed (DeepSeek-V4: sliding window and compressed keys), linear (recurrent state)."""
    heads: int
    """Query heads; value heads of linear attention."""
    kv_heads: int
    """Key and value heads; key heads of linear attention. MLA expands to `heads` keys in training."""
    qk_dim: int
    """Width of one query or key head, rotary part included."""
    v_dim: int
    """Width of one value head."""
    window_tokens: int | None = None
    """Length of the sliding window or of the chunk."""
    q_rank: int | None = None
    """Rank of the query's low-rank path (MLA); None: one full projection."""
    kv_rank: int | None = None
    """Width of the cached latent (MLA), without the rotary key."""
    rope_dim: int | None = None
    """Rotary part of qk_dim where only a part rotates (MLA)."""
    compression: int = 1
    """Tokens folded into one cached key (compressed)."""
    index_heads: int = 0
    """Heads of the indexer that picks keys; 0: every key is read, or this layer shares an earlier layer's choice."""
    index_dim: int = 0
    """Width of one indexer head."""
    index_top_k: int | None = None
    """Keys a query reads at most (sparse_latent; compressed keys of compressed)."""
    gated: bool = False
    """The output is multiplied by a gate as wide as itself."""
    conv_kernel: int = 0
    """Taps of the causal convolution before linear attention; 0: none."""

    @property
    def cache_elements_per_token(self) -> int:
        """Numbers kept per token by a decoding cache, before any window; linear attention keeps none."""
        if self.kind == "linear":
            return 0
        if self.kv_rank is not None:
            return self.kv_rank + (self.rope_dim or 0)
        if self.kind == "compressed":
            return self.kv_heads * self.qk_dim
        return self.kv_heads * (self.qk_dim + self.v_dim)

    @property
    def state_elements(self) -> int:
        """Numbers of the recurrent state of one sequence (linear attention): heads × key width × value width."""
        return self.heads * self.qk_dim * self.v_dim if self.kind == "linear" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Channel mixing of one layer."""

    kind: MlpKind
    width: int
    """Inner width of the dense MLP, or of one routed expert."""
    matrices: int = 3
    """3 with a gate (SwiGLU and kin), 2 without."""
    experts: int = 0
    """Routed experts; 0 in a dense layer."""
    top_k: int = 0
    """Routed experts each token visits."""
    shared_width: int = 0
    """Inner width of all shared experts of the layer together; 0: none. Also a dense MLP beside the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    attention: Attention | None
    """None: the layer has no token mixing."""
    mlp: Mlp | None
    """None: the layer has no channel mixing (granitemoehybrid keeps both; nemotron_h does not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear module, or the matrices of one name of all routed experts of a layer."""

    name: str
    """Leaf name in transformers 5.24: q_proj, gate_up_proj (two fused), down_proj …"""
    inputs: int
    outputs: int
    copies: int = 1
    """Equal matrices: experts in a fused tensor, blocks of a block-diagonal projection."""
    active: int = 1
    """Copies one token passes through: top-k for experts."""
    bias: bool = False
    module: bool = True
    """False: a bare parameter used as a matrix (a router's weight), which PEFT does not target by module."""

    @property
    def parameters(self) -> int:
        return self.copies * self.outputs * (self.inputs + self.bias)

    @property
    def weights(self) -> int:
        """Elements of the matrices alone: what 4-bit and 8-bit formats store in few bits."""
        return self.copies * self.outputs * self.inputs

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds count two; forward only."""
        return 2 * self.active * self.outputs * self.inputs

    def lora_parameters(self, rank: int) -> int:
        """rank × (inputs + outputs) for each copy: A [rank, inputs] and B [outputs, rank]."""
        return self.copies * rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """The tensors of one role in one layer."""

    role: TensorRole
    layer: int | None
    """Index of the block; None outside the blocks. MTP blocks count on after the last layer."""
    parameters: int
    """All of them: matrices, biases, and what is no matrix (norm weights, convolution taps, sinks)."""
    experts: int = 1
    """Routed experts the parameters divide over under EP; 1 for every other role."""
    linears: tuple[Linear, ...] = ()

    @property
    def linear_weights(self) -> int:
        return sum(linear.weights for linear in self.linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only language model as transformers 5.24 builds it (AutoModelForCausalLM)."""

    name: str
    """Catalogue name, or the folder's."""
    family: str
    """`model_type` of the text model's config.json."""
    hidden: int
    """Width of the residual stream."""
    vocab: int
    tied: bool
    """The head is the embedding: one tensor, counted once, under the role embedding."""
    layers: tuple[Layer, ...]
    groups: tuple[TensorGroup, ...]
    """In the order of the forward pass; those of role `mtp` last."""
    dtype: str = "bfloat16"
    """Type the checkpoint is stored in, as its config says it."""
    quantization: str | None = None
    """`quant_method` of the config: fp8, mxfp4, …; None for a plain checkpoint."""
    storage: str | None = None
    """What that amounts to, a key of planner/weights.FORMATS; None where its bytes are not known, or it is plain."""
    max_tokens: int | None = None
    """`max_position_embeddings`."""
    residual_streams: int = 1
    """Copies of the residual stream carried through the layers (DeepSeek-V4's hyper-connections: 4)."""
    logit_softcap: bool = False
    """Logits pass through tanh (Gemma 2): one more [tokens, vocab] buffer."""
    assumed: tuple[str, ...] = ()
    """Keys the config left out, filled with transformers' defaults for the family: `num_experts=128`."""
    left_out: tuple[str, ...] = ()
    """Parts of the checkpoint that are not counted here: vision_config, audio_config."""

    @property
    def parameters(self) -> int:
        """What transformers builds and trains: everything but MTP layers, which it does not load."""
        return sum(group.parameters for group in self.groups if group.role != "mtp")

    @property
    def mtp_parameters(self) -> int:
        """Multi-token-prediction layers of the checkpoint: on disk, not in the built model."""
        return sum(group.parameters for group in self.groups if group.role == "mtp")

    @property
    def checkpoint_parameters(self) -> int:
        return self.parameters + self.mtp_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters one token uses: as `parameters`, with top-k of the routed experts; embeddings are counted."""
        idle = 0
        for group in self.groups:
            if group.role == "routed_experts" and group.layer is not None:
                mlp = self.layers[group.layer].mlp
                assert mlp is not None
                idle += group.parameters // mlp.experts * (mlp.experts - mlp.top_k)
        return self.parameters - idle

    @property
    def is_moe(self) -> bool:
        return any(group.role == "routed_experts" for group in self.groups)

    @property
    def experts(self) -> int:
        """Routed experts of the largest MoE layer; 0 for a dense model."""
        return max((layer.mlp.experts for layer in self.layers if layer.mlp), default=0)

    @property
    def top_k(self) -> int:
        return max((layer.mlp.top_k for layer in self.layers if layer.mlp), default=0)

    def parameters_by_role(self) -> dict[TensorRole, int]:
        """Roles that occur, in the order of ROLES; mtp included."""
        counts: Counter[TensorRole] = Counter()
        for group in self.groups:
            counts[group.role] += group.parameters
        return {role: counts[role] for role in ROLES if counts[role]}

    def layer_parameters(self, layer: int) -> int:
        """What FSDP gathers for one block."""
        return sum(group.parameters for group in self.groups if group.layer == layer and group.role != "mtp")

    def linears(self, roles: Collection[TensorRole]) -> list[tuple[TensorGroup, Linear]]:
        return [(group, linear) for group in self.groups if group.role in roles for linear in group.linears]

    def lora_parameters(self, rank: int, *, roles: Collection[TensorRole], names: Collection[str] | None = None) -> int:
        """Adapter parameters of rank `rank` on the modules of these roles; `names` keeps only some leaf names."""
        return sum(
            linear.lora_parameters(rank)
            for _, linear in self.linears(roles)
            if linear.module and (names is None or linear.name in names)
        )


TARGET_ROLES: dict[str, tuple[TensorRole, ...]] = {
    "attention": ("attention", "linear_attention"),
    "mlp": ("dense_mlp",),
    "experts": ("routed_experts",),
    "shared_experts": ("shared_experts",),
    "router": ("router",),
    "embedding": ("embedding",),
    "head": ("head",),
}
"""Tensor roles behind each entry of `method.adapter.targets` in a run file."""
TRAINED_ROLES: dict[str, tuple[TensorRole, ...]] = {**TARGET_ROLES, "norm": ("norms",)}
"""Tensor roles behind each entry of `method.roles` and `method.adapter.full`."""
