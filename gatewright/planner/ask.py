"""From words to a question: finds the model, the GPU and the policy, and refuses what is unknown or out of range."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.job import (
    AttentionKernel,
    Checkpointing,
    Job,
    Layout,
    Method,
    Optimizer,
    Sharding,
    Storage,
)
from gatewright.planner.legal_rule import Backend
from gatewright.planner.policy import find_policy
from gatewright.planner.search import Question
from gatewright.planner.targets import adapter_of
from gatewright.planner.weights import FORMATS, StoredWeights, native_format, read_weights
from gatewright.spec.auto import AUTO_MICRO_BATCH_TOKENS
from gatewright.spec.errors import ModelError, UserError
from gatewright.spec.hardware import Gpu
from gatewright.spec.shape import ModelShape, TensorRole

DEFAULT_RANK = 16
DEFAULT_TARGETS = ("attention",)
LIMITS: dict[str, int] = {
    "gpus": 16_384,
    "per_node": 1024,
    "rank": 65_536,
    "tokens": 10**8,
    "document_tokens": 10**8,
    "tokens_per_step": 10**12,
    "steps": 10**9,
    "hours": 10**5,
    "price": 10**3,
}
"""Beyond these a number is a slip of the pen, not a plan."""
SIZES = ("ep", "etp", "tp", "pp", "cp", "dp_replicate")
DENSE: dict[str, Sharding] = {
    "replicate": "none",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp1": "fsdp1",
    "fsdp2": "fsdp2",
}
"""How everything but the experts is laid out, in the words of a run file's parallel.dense and of other tools."""
LEAST_BYTES, MOST_BYTES = 0.4, 4.5
"""Bytes of a stored parameter, from 4 bits to fp32."""


def ask(
    model: str | ModelShape,
    *,
    gpu: str | Gpu,
    per_node: int | None = None,
    method: Method = "lora",
    rank: int = DEFAULT_RANK,
    targets: Sequence[str] = DEFAULT_TARGETS,
    target_names: Iterable[str] | None = None,
    trained: Sequence[str] = (),
    expert_share: float = 1.0,
    expert_numbers: Sequence[Sequence[int]] = (),
    dropout: bool = False,
    storage: str | None = None,
    tokens: int | None = None,
    document_tokens: int | None = None,
    tokens_per_step: int | None = None,
    hours: float | None = None,
    steps: int | None = None,
    price: float | None = None,
    framework: str = "gatewright",
    backend: Backend = "gatewright",
    layout: Layout | None = None,
    checkpointing: Checkpointing = "full",
    attention: AttentionKernel = "flash",
    optimizer: Optimizer = "adamw",
    frozen: frozenset[TensorRole] = frozenset({"router"}),
    loss_chunk_tokens: int | None = None,
) -> Question:
    """The question behind a catalogue name or path, a GPU and a method.

    `target_names` keeps only some leaf names of the targets, such as q_proj; `trained` names roles that train in full
    beside the adapter, `expert_share` the part of the experts that gets one, `expert_numbers` which those are, layer by
    layer, where that is known. `storage` is one of weights.FORMATS; None takes the checkpoint's own for LoRA, from the
    headers of its files where they are there, and nf4 for QLoRA.
    Raises UserError or ModelError with the nearest choice.
    """
    shape = find_shape(model) if isinstance(model, str) else model
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    within_limits(
        per_node=per_node, rank=rank, tokens=tokens, document_tokens=document_tokens, tokens_per_step=tokens_per_step,
        steps=steps,
    )  # fmt: skip
    above_zero(hours=hours, price=price)
    for name, value, known in (
        ("method", method, Method),
        ("checkpointing", checkpointing, Checkpointing),
        ("attention", attention, AttentionKernel),
        ("optimizer", optimizer, Optimizer),
        ("backend", backend, Backend),
    ):
        known_choice(name, value, get_args(known))
    weights = weights_of(model, shape) if isinstance(model, str) else None
    exact = weights is not None and method == "lora" and storage is None
    dense, experts = storages(shape, method=method, name=storage)
    adapter = None
    if method != "full":
        adapter = adapter_of(
            shape,
            rank=rank,
            targets=targets,
            names=target_names,
            full=trained,
            expert_share=expert_share,
            expert_numbers=expert_numbers,
            dropout=dropout,
        )
    job = Job(
        shape=shape,
        method=method,
        framework=find_policy(framework).key,
        adapter=adapter,
        storage=dense,
        expert_storage=experts,
        stored=bytes_a_parameter(weights, shape) if exact and weights else {},
        frozen=frozen,
        tokens_per_row=AUTO_MICRO_BATCH_TOKENS if tokens is None else tokens,
        attention_tokens=document_tokens,
        checkpointing=checkpointing,
        attention=attention,
        loss="linear" if framework == "gatewright" else "full",
        loss_chunk_tokens=loss_chunk_tokens,
        optimizer=optimizer,
    )
    return Question(
        job=job,
        gpu=device,
        per_node=per_node or device.per_node,
        tokens_per_step=tokens_per_step,
        tokens_open=tokens is None and document_tokens is None,
        backend=backend,
        layout=layout,
        hours=hours,
        steps=steps,
        usd_per_gpu_hour=price,
        weights=weights,
    )


def within_limits(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not 1 <= value <= LIMITS[name]:
            raise UserError(f"{name} {value:,}: wanted a whole number from 1 to {LIMITS[name]:,}.")


def above_zero(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value <= LIMITS[name]:
            raise UserError(f"{name} {value:g}: wanted a number above 0, up to {LIMITS[name]:,}.")


def known_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.4)
        nearest = f" Nearest: {near[0]}." if near else ""
        raise UserError(f"{name} {value[:40]!r} is unknown.{nearest} Known: {', '.join(known)}.")


def storages(shape: ModelShape, *, method: Method, name: str | None) -> tuple[Storage, Storage | None]:
    """How frozen matrices are stored: (dense, experts where they differ)."""
    if method == "full":
        return "bf16", None
    key = name or ("nf4" if method == "qlora" else native_format(shape))
    if key not in FORMATS:
        near = difflib.get_close_matches(key, FORMATS, n=1, cutoff=0.4)
        nearest = f" Nearest: {near[0]}." if near else ""
        raise ModelError(f"No storage is called {key[:40]!r}.{nearest} Known: {', '.join(FORMATS)}.")
    stored = FORMATS[key]
    return stored.dense, None if stored.experts == stored.dense else stored.experts


def weights_of(model: str, shape: ModelShape) -> StoredWeights | None:
    """The headers of the safetensors files in a model's folder; None where there are none."""
    folder = Path(model)
    if not folder.is_dir() or not any(folder.glob("*.safetensors*")):
        return None
    return read_weights(folder, layers=len(shape.layers))


def bytes_a_parameter(weights: StoredWeights, shape: ModelShape) -> dict[TensorRole, float]:
    """By role, scales included. Empty where most bytes are fp32, since a run loads those as bf16.

    Raises ModelError when the files cannot be those of the config.
    """
    if 2 * weights.bytes_by_dtype.get("F32", 0) > weights.bytes:
        return {}
    counts = shape.parameters_by_role()
    shares = {role: size / counts[role] for role, size in weights.bytes_by_role.items() if role in counts}
    for role, share in shares.items():
        if not LEAST_BYTES <= share <= MOST_BYTES:
            raise ModelError(
                f"{weights.path}: its files hold {weights.bytes_by_role[role]:,} bytes of {role.replace('_', ' ')}, "
                f"its config.json says {counts[role]:,} parameters: they are not of one model. Check the folder."
            )
    return shares


def layout_from(text: str, *, ranks: int, backend: Backend = "gatewright") -> Layout:
    """A layout in words such as `ep=8,dense=zero2`, in the terms of a run file's `parallel`, and tp, pp, etp beside.

    Raises UserError for an unknown word or a size that is no whole number of at least 1.
    """
    sizes: dict[str, int] = {}
    sharding: Sharding = "none"
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        if name == "dense":
            known_choice("dense", value, tuple(DENSE))
            sharding = DENSE[value]
        else:
            known_choice("parallel", name, (*SIZES, "dense"))
            if not value.isdecimal() or not 1 <= int(value) <= LIMITS["gpus"]:
                raise UserError(f"parallel {item[:40]}: wanted a whole number of at least 1, such as {name}=8.")
            sizes[name] = int(value)
    if sharding == "zero3" and not backend.startswith("deepspeed"):
        sharding = "fsdp1" if backend == "fsdp1" else "fsdp2"
    copies = sizes.pop("dp_replicate", 1)
    return Layout(
        ranks=ranks,
        sharding=sharding,
        sequence_parallel=sizes.get("tp", 1) > 1,
        shard_ranks=max(1, ranks // copies) if copies > 1 else None,
        **sizes,
    )
