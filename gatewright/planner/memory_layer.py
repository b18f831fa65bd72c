"""Activations of one decoder layer, in bytes a token: what its forward pass keeps, and what its backward pass needs.

A layer is a list of operations in forward order. Each says which tensors it keeps for its own backward, and which
gradients are alive while that backward runs. The backward pass walks the list from the end; its peak is the largest
sum of what is still kept and what is in flight. Widths: h residual stream, i MLP, q k v o attention, b bytes of an
activation, r bytes of a residual.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gatewright.planner.job import Job
from gatewright.planner.policy import Policy
from gatewright.spec.shape import Attention, Layer, Mlp, TensorRole

FP32 = 4
INDEX = 8
"""Bytes of an integer that says where a row goes."""
LOOP_IMBALANCE = 2.0
"""Tokens of the busiest expert over the mean, where experts run one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a layer; all figures in bytes a token on one rank."""

    name: str
    keeps: float = 0.0
    """Saved by the forward pass for this operation's backward."""
    product: float = 0.0
    """What per-op checkpointing keeps of it: attention's output and every second matrix product (torchtitan)."""
    grads: float = 0.0
    """Gradients and temporaries alive while its backward runs, without the residual's gradient."""
    recomputed_by: tuple[str, ...] = ()
    """Names of selective recomputation (Job.recompute) that spare the kept tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Bytes a token of one layer."""

    kept: float
    """Alive between the forward and the backward pass without checkpointing."""
    kept_products: float
    """Alive with per-op checkpointing."""
    backward: float
    """Peak of the backward pass of the layer, everything it keeps (or recomputes) included."""
    at: str
    """The operation at that peak."""


def layer_work(job: Job, policy: Policy, layer: Layer) -> LayerWork:
    ops = [*attention_ops(job, policy, layer.attention), *mlp_ops(job, policy, layer.mlp)]
    residual_grad = policy.residual_bytes(job) * job.shape.hidden * job.shape.residual_streams / sequence_split(job)
    ops.append(Op(name="other", keeps=policy.kept_extra * job.shape.hidden / sequence_split(job)))
    alive, peak, at = 0.0, 0.0, "none"
    for op in ops:
        alive += op.keeps
        if alive + op.grads > peak:
            peak, at = alive + op.grads, op.name
    kept = sum(op.keeps for op in ops if not job.recompute.intersection(op.recomputed_by))
    products = sum(op.product for op in ops)
    return LayerWork(kept=kept, kept_products=products, backward=peak + residual_grad, at=at)


def sequence_split(job: Job) -> int:
    """Ranks that share one token's norms and residual."""
    return job.layout.tp if job.layout.sequence_parallel else 1


def adapted(job: Job, role: TensorRole, *names: str) -> bool:
    """Whether one of these modules carries an adapter. Fused names (gate_up_proj) count for their parts."""
    return job.adapter is not None and any(job.adapter.share(role, name) > 0 for name in names)


def norm_op(job: Job, policy: Policy, name: str, width: float) -> Op:
    """RMSNorm or LayerNorm. Eager ones upcast: the fp32 input is kept, five fp32 temporaries live in its backward."""
    b = policy.activation_bytes
    if policy.norm_style(job) == "eager":
        trained = b * width if job.trains("norms") else 0.0
        return Op(name=name, keeps=FP32 * width + trained + FP32, grads=5 * FP32 * width)
    residual = policy.residual_bytes(job) * width
    return Op(name=name, keeps=residual + FP32, grads=2 * b * width)


def input_bytes(job: Job, policy: Policy, role: TensorRole, width: float, modules: Iterable[tuple[str, ...]]) -> float:
    """Kept inputs of the linears that read one tensor: shared if weights train, a copy an adapter under autocast."""
    b = policy.activation_bytes
    if job.trains(role):
        return b * width
    stored = quantized_input_bytes(job, policy, role) * width
    adapters = [names for names in modules if adapted(job, role, *names)]
    if not adapters or job.adapter is None:
        return stored
    inner = b * job.adapter.rank * len(adapters)
    if role == "routed_experts":  # adapters of fused experts read the tokens once, sorted by expert
        return stored + b * width + inner
    if job.adapter.dropout:
        return stored + len(adapters) * (policy.adapter_input_bytes + 1) * width + inner
    if policy.adapter_copies_input:
        return stored + len(adapters) * policy.adapter_input_bytes * width + inner
    return stored + b * width + inner


def quantized_input_bytes(job: Job, policy: Policy, role: TensorRole) -> float:
    if job.storage_of(role) in ("bf16", "fp32"):
        return 0.0
    return policy.quantized_input_bytes


def attention_ops(job: Job, policy: Policy, attention: Attention | None) -> list[Op]:
    if attention is None:
        return []
    if attention.kind == "linear":
        return linear_attention_ops(job, policy, attention)
    shape, b, tp = job.shape, policy.activation_bytes, job.layout.tp
    sp = sequence_split(job)
    h = shape.hidden / sp
    q = attention.heads * attention.qk_dim / tp
    o = attention.heads * attention.v_dim / tp
    expands = attention.kv_rank is not None or policy.repeats_kv(job)
    kv_heads = attention.heads if expands else attention.kv_heads
    kv = max(kv_heads / tp, 1) * (attention.qk_dim + attention.v_dim)
    gate = o if attention.gated else 0.0
    norm = norm_op(job, policy, "attention norm", h)
    entry = input_bytes(job, policy, "attention", shape.hidden / tp if sp > 1 else shape.hidden, qkv_modules(attention))
    latent = latent_bytes(job, policy, attention)
    qk_norm = qk_norm_bytes(job, policy) * (q + kv / 2) if has_qk_norm(job) else 0.0
    scores, score_grads = score_bytes(job, policy, attention)
    core_keeps = b * (q + kv + o + 2 * gate) + FP32 * attention.heads / tp
    out_input = input_bytes(job, policy, "attention", o, [("o_proj", "dense", "proj")])
    shared = b * o if job.trains("attention") or (out_input and not policy.adapter_copies_input) else 0.0
    return [
        norm,
        Op(name="qkv projections", keeps=entry + latent, grads=b * (q + kv) + 2 * b * h),
        Op(name="query and key norms, rotary", keeps=qk_norm, grads=2 * b * (q + kv) + 2 * qk_norm),
        Op(
            name="attention",
            keeps=core_keeps + scores,
            product=b * (q + kv / 2 + o),
            grads=b * (q + kv + o) + attention_workspace(job, policy, attention) + score_grads,
        ),
        Op(name="output projection", keeps=max(0.0, out_input - shared), grads=b * o),
    ]


def attention_workspace(job: Job, policy: Policy, attention: Attention) -> float:
    """What the kernel's backward allocates beside its gradients.

    The query's gradient is summed in fp32. Deterministic, FlashAttention gives each wave of multiprocessors that heads
    and documents leave idle a sum of its own (flash_api.cpp: mha_varlen_bwd), and keys and values that queries share
    have a gradient for every query head.
    """
    heads = attention.heads / job.layout.tp
    q = heads * attention.qk_dim
    if not policy.attention_multiprocessors:
        return policy.attention_workspace_bytes * q
    documents = math.ceil(job.micro_batch_tokens / min(job.attention_tokens or job.row_tokens, job.row_tokens))
    sums = math.ceil(policy.attention_multiprocessors / (documents * heads)) if job.attention == "flash" else 1
    shared = policy.activation_bytes * (q + heads * attention.v_dim) if attention.kv_heads < attention.heads else 0.0
    return policy.attention_workspace_bytes * q * sums + FP32 * heads + shared


def qkv_modules(attention: Attention) -> list[tuple[str, ...]]:
    if attention.kv_rank is not None:
        return [("q_a_proj", "q_proj"), ("kv_a_proj_with_mqa",)]
    return [("q_proj", "qkv_proj", "c_attn", "attn"), ("k_proj",), ("v_proj", "value")]


def qk_norm_bytes(job: Job, policy: Policy) -> float:
    """Kept for an element of a normed query or key: the fp32 copy, and the normed one if the norm trains."""
    if policy.norm_style(job) == "fused":
        return policy.activation_bytes
    return FP32 + (policy.activation_bytes if job.trains("norms") else 0)


def has_qk_norm(job: Job) -> bool:
    return job.shape.family.startswith(("qwen3", "olmo", "gemma3", "glm4_moe", "hunyuan", "ernie", "minimax"))


def latent_bytes(job: Job, policy: Policy, attention: Attention) -> float:
    """MLA's low-rank paths: compressed queries and keys, each normed."""
    if attention.kv_rank is None:
        return 0.0
    rank = (attention.q_rank or 0) + attention.kv_rank
    per_element = policy.activation_bytes * 2 + (FP32 if policy.norm_style(job) == "eager" else policy.activation_bytes)
    return per_element * rank


def score_bytes(job: Job, policy: Policy, attention: Attention) -> tuple[float, float]:
    """The [heads, tokens, keys] matrices of eager attention: (kept, gradients); nothing with a fused kernel."""
    if job.attention != "eager":
        return 0.0, 0.0
    keys = min(job.attention_tokens or job.row_tokens, attention.window_tokens or job.row_tokens)
    elements = attention.heads / job.layout.tp * keys
    return policy.score_kept_bytes * elements, policy.score_grad_bytes * elements


def linear_attention_ops(job: Job, policy: Policy, attention: Attention) -> list[Op]:
    """Gated delta rule and state-space layers with fused kernels: the projections, the convolution's output, the
    result and its gated norm are kept, chunk states are recomputed."""
    b, tp = policy.activation_bytes, job.layout.tp
    h = job.shape.hidden / sequence_split(job)
    qk = 2 * attention.kv_heads * attention.qk_dim / tp
    v = attention.heads * attention.v_dim / tp
    entry = input_bytes(job, policy, "linear_attention", h, DELTA_INPUTS)
    upcast = FP32 * v if policy.norm_style(job) == "eager" else 0.0
    out_input = input_bytes(job, policy, "linear_attention", v, [("out_proj", "o_proj")])
    return [
        norm_op(job, policy, "attention norm", h),
        Op(name="input projections", keeps=entry, grads=b * (qk + 2 * v) + 2 * b * h),
        Op(name="convolution", keeps=b * (qk + 2 * v), product=b * (qk + v), grads=2 * b * (qk + v)),
        Op(name="delta rule", keeps=b * (qk + 2 * v), product=b * v, grads=2 * b * (qk + 2 * v)),
        Op(name="gated norm", keeps=upcast, grads=2 * upcast + 2 * b * v),
        Op(name="output projection", keeps=out_input, grads=b * v),
    ]


DELTA_INPUTS = [("in_proj_qkvz", "in_proj_qkv", "in_proj"), ("in_proj_ba", "in_proj_b"), ("in_proj_z",), ("in_proj_a",)]


def mlp_ops(job: Job, policy: Policy, mlp: Mlp | None) -> list[Op]:
    if mlp is None:
        return []
    h = job.shape.hidden / sequence_split(job)
    norm = norm_op(job, policy, "mlp norm", h)
    if mlp.kind == "dense":
        ops = gated_ops(job, policy, "dense_mlp", width=mlp.width / job.layout.tp, matrices=mlp.matrices)
        return [norm, *(replace(op, recomputed_by=("mlp",)) for op in ops)]
    shared: list[Op] = []
    if mlp.shared_width:
        width = mlp.shared_width / job.layout.tp
        ops = gated_ops(job, policy, "shared_experts", width=width, matrices=mlp.matrices)
        shared = [replace(op, recomputed_by=("moe",)) for op in ops]
    return [norm, router_op(job, policy, mlp), *shared, *expert_ops(job, policy, mlp)]


def gated_ops(
    job: Job, policy: Policy, role: TensorRole, *, width: float, matrices: int, visits: float = 1.0, label: str = ""
) -> list[Op]:
    """act(gate) × up, then down. Fused kernels keep gate and up only and write gradients in place."""
    b, tp = policy.activation_bytes, job.layout.tp
    i = width * visits
    h = job.shape.hidden * visits
    name = label or role.replace("_", " ")
    act = ("moe_act",) if role == "routed_experts" else ()
    entry = input_bytes(job, policy, role, h, [("gate_proj", "gate_up_proj", "fc_1"), ("up_proj", "fc_2", "c_fc")])
    down = input_bytes(job, policy, role, i, [("down_proj", "proj", "c_proj")])
    copied = policy.adapter_input_bytes if down and job.adapter and policy.adapter_copies_input else 0
    down_grads = b * i + (copied * i if role != "routed_experts" else 0.0)
    if visits == 1.0 and sequence_split(job) > 1:
        entry /= tp
    gates = matrices - 1
    out = b * h / sequence_split(job)
    if policy.mlp_style(job) == "fused":
        extra = down if job.trains(role) and policy.keeps_product else 0.0
        return [
            Op(name=f"{name} in", keeps=entry, grads=gates * b * i + 2 * b * h / sequence_split(job)),
            Op(name=f"{name} activation", keeps=gates * b * i, product=b * i, grads=2 * b * i),
            Op(
                name=f"{name} down",
                keeps=extra or (down if job.adapter else 0.0),
                product=out,
                grads=down_grads,
                recomputed_by=act,
            ),
        ]
    if gates == 1:
        return [
            Op(name=f"{name} in", keeps=entry, grads=b * i + b * h),
            Op(name=f"{name} activation", keeps=b * i, product=b * i, grads=2 * b * i),
            Op(name=f"{name} down", keeps=down, grads=down_grads, recomputed_by=act),
        ]
    return [
        Op(name=f"{name} in", keeps=entry, grads=2 * b * i + 2 * b * h / sequence_split(job)),
        Op(name=f"{name} activation", keeps=b * i, product=b * i, grads=3 * b * i),
        Op(name=f"{name} gate", keeps=2 * b * i, grads=3 * b * i),
        Op(name=f"{name} down", keeps=down, product=out, grads=down_grads),
    ]


def router_op(job: Job, policy: Policy, mlp: Mlp) -> Op:
    """Logits, probabilities and their gradients in fp32."""
    elements = mlp.experts / sequence_split(job)
    return Op(name="router", keeps=3 * FP32 * elements, grads=3 * FP32 * elements)


def expert_ops(job: Job, policy: Policy, mlp: Mlp) -> list[Op]:
    """Tokens copied once a chosen expert, the experts' MLP on the copies, their weighted sum."""
    if policy.lean_experts(job) and not job.trains("routed_experts"):
        return lean_expert_ops(job, policy, mlp)
    b, layout = policy.activation_bytes, job.layout
    visits = mlp.top_k * job.overload / sequence_split(job)
    h = job.shape.hidden
    inner = gated_ops(
        job,
        policy,
        "routed_experts",
        width=mlp.width / layout.etp,
        matrices=mlp.matrices,
        visits=visits,
        label="experts",
    )
    copies = 2 if layout.ep > 1 else 1
    # Grouped matrix products are not on per-op checkpointing's list: nothing of the experts is kept by it.
    inner = [replace(op, product=0.0) for op in inner]
    if policy.experts == "loop":
        inner = [replace(op, grads=op.grads / mlp.experts * LOOP_IMBALANCE) for op in inner]
    dispatch = Op(name="dispatch", grads=copies * b * h * visits)
    combine = Op(
        name="combine",
        keeps=b * h * visits * policy.combine_kept_copies,
        grads=(2 + copies) * b * h * visits,
    )
    ops = [dispatch, *inner, combine]
    return [replace(op, recomputed_by=(*op.recomputed_by, "moe")) for op in ops]


def lean_expert_ops(job: Job, policy: Policy, mlp: Mlp) -> list[Op]:
    """Frozen experts as model/experts.py runs them: forward keeps x, the routing and the up-projection of each row.

    Their one backward makes act(gate), the weighted product before the down-projection and the sorted copies of x
    again, and lets each go after its use. Fullest in one of three places: at the down-projection's gradients, at the
    activation's, or where the up-projection gives the gradient of x, with the adapter's part of it as wide again.
    """
    b, layout = policy.activation_bytes, job.layout
    visits = mlp.top_k * job.overload / sequence_split(job)
    h, i = job.shape.hidden, mlp.width / layout.etp
    gates = mlp.matrices - 1
    adapts = adapted(job, "routed_experts", "gate_up_proj", "gate_proj", "up_proj", "down_proj")
    entry = h * visits if layout.ep > 1 else h / sequence_split(job)
    down = 4 * i + h + (i if adapts else 0)  # act(gate), its product with up, the same weighted, the gradient of that
    activation = (6 if gates > 1 else 3) * i
    up = gates * i + (2 if adapts else 1) * h
    sent = h if layout.ep > 1 else 0
    keeps = b * entry + visits * (b * gates * i + 2 * INDEX + b)
    grads = b * visits * (max(activation, up, down) + sent)
    return [Op(name="experts", keeps=keeps, grads=grads, recomputed_by=("moe",))]
