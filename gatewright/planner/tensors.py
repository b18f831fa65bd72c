"""Tensor groups of the parts that decoders are made of: embeddings, attention, MLPs, experts, norms, heads."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gatewright.spec.shape import Attention, Layer, Linear, Mlp, ModelShape, TensorGroup, TensorRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer: what it computes, and its tensors; their layer index is set when the model is put together."""

    layer: Layer
    groups: tuple[TensorGroup, ...]


def group(role: TensorRole, *linears: Linear, extra: int = 0, experts: int = 1) -> TensorGroup:
    """The linear modules and `extra` parameters that belong to none."""
    parameters = extra + sum(linear.parameters for linear in linears)
    return TensorGroup(role=role, layer=None, parameters=parameters, experts=experts, linears=linears)


def linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
    return Linear(name=name, inputs=inputs, outputs=outputs, bias=bias)


def norms(width: int, *, count: int, bias: bool = False) -> TensorGroup:
    return group("norms", extra=count * width * (1 + bias))


def grouped_attention(
    attention: Attention,
    *,
    hidden: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    extra: int = 0,
    fused: bool = False,
) -> TensorGroup:
    """Queries, keys, values and output of multi-head, grouped-query or multi-query attention.

    A gated output doubles the query projection (Qwen3-Next). `extra` counts query and key norms and sinks.
    """
    query = attention.heads * attention.qk_dim
    key, value = attention.kv_heads * attention.qk_dim, attention.kv_heads * attention.v_dim
    output = linear("o_proj", attention.heads * attention.v_dim, hidden, bias=out_bias)
    if fused:
        return group("attention", linear("qkv_proj", hidden, query + key + value, bias=qkv_bias), output, extra=extra)
    return group(
        "attention",
        linear("q_proj", hidden, query * (1 + attention.gated), bias=qkv_bias),
        linear("k_proj", hidden, key, bias=qkv_bias),
        linear("v_proj", hidden, value, bias=qkv_bias),
        output,
        extra=extra,
    )


def gated_mlp(
    role: TensorRole,
    *,
    hidden: int,
    width: int,
    bias: bool = False,
    fused: bool = False,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> TensorGroup:
    """SwiGLU and kin, in three modules or, fused, in two of these names."""
    fused_name, down_name = names
    up = (
        (linear(fused_name, hidden, 2 * width, bias=bias),)
        if fused
        else (linear("gate_proj", hidden, width, bias=bias), linear("up_proj", hidden, width, bias=bias))
    )
    return group(role, *up, linear(down_name, width, hidden, bias=bias))


def plain_mlp(role: TensorRole, *, hidden: int, width: int, bias: bool = False) -> TensorGroup:
    """Two matrices, no gate."""
    return group(role, linear("up_proj", hidden, width, bias=bias), linear("down_proj", width, hidden, bias=bias))


def router(
    mlp: Mlp,
    *,
    hidden: int,
    bias: bool = False,
    module: bool = False,
    shared_gate: bool = False,
    extra: int = 0,
) -> TensorGroup:
    """Scores of the routed experts; `shared_gate` adds the one-output gate of Qwen's shared expert."""
    gates = [Linear(name="gate", inputs=hidden, outputs=mlp.experts, bias=bias, module=module)]
    if shared_gate:
        gates.append(linear("shared_expert_gate", hidden, 1))
    return group("router", *gates, extra=extra)


def routed_experts(mlp: Mlp, *, hidden: int, bias: bool = False) -> TensorGroup:
    """All routed experts of a layer as transformers 5.24 holds them: two stacked tensors, gate and up fused."""
    up = Linear(
        name="gate_up_proj" if mlp.matrices == 3 else "up_proj",
        inputs=hidden,
        outputs=(mlp.matrices - 1) * mlp.width,
        copies=mlp.experts,
        active=mlp.top_k,
        bias=bias,
    )
    down = Linear(name="down_proj", inputs=mlp.width, outputs=hidden, copies=mlp.experts, active=mlp.top_k, bias=bias)
    return group("routed_experts", up, down, experts=mlp.experts)


def assemble(
    shape: ModelShape,
    *,
    blocks: Iterable[Block],
    mtp: Iterable[Block] = (),
    final: Iterable[TensorGroup] = (),
    head_bias: bool = False,
) -> ModelShape:
    """`shape` with its layers and groups: embedding, blocks, `final` (default: one norm), head, MTP blocks."""
    layers: list[Layer] = []
    groups = [group("embedding", extra=shape.vocab * shape.hidden)]
    for index, block in enumerate(blocks):
        layers.append(block.layer)
        groups += [replace(part, layer=index) for part in block.groups]
    groups += tuple(final) or (norms(shape.hidden, count=1),)
    head = linear("lm_head", shape.hidden, shape.vocab, bias=head_bias)
    if not shape.tied:
        groups.append(group("head", head))
    elif head_bias:
        groups.append(group("head", extra=shape.vocab))
    for index, block in enumerate(mtp, start=len(layers)):
        groups += [replace(part, role="mtp", layer=index) for part in block.groups]
    return replace(shape, layers=tuple(layers), groups=tuple(groups))
