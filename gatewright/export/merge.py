"""Merging an adapter into its base model, tensor by tensor in float32, under the names the base's files use.

A tensor is read, gets its update, is rounded once to the type asked for, and is written; nothing else is in memory but
the adapter. What the base holds in FP8 or MXFP4 is made dense on the way. The base's files are never touched.
"""

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

from gatewright.export.deltas import AdapterFiles, LowRank
from gatewright.export.shards import Planned, Shard, plan_shards, write_index, write_shard
from gatewright.model.load import read_config
from gatewright.model.sources import Shards, Source, read_format, sources_of
from gatewright.model.stream import Weight, weights_of
from gatewright.spec.errors import ModelError

LOST = 0.1
"""Share of the update that rounding may take, in the median over tensors, before a person is told."""
WATCHED_ROWS = 64
"""Rows of each tensor that rounding is measured on; measuring all of them took as long as merging."""
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.model",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What rounding the merged weights to their type did to the update."""

    lost: float
    """‖rounded − exact‖ / ‖update‖, the median over tensors with an update."""
    unchanged: float
    """Share of the updated tensors' values that are those of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    folder: Path
    tensors: int
    updated: int
    bytes: int
    rounding: Rounding


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of the output: where it comes from, and what is added to it."""

    source: Source | None
    """None: the adapter brings it whole."""
    value: Tensor | None
    update: Callable[[Tensor], Tensor] | None
    """From the base's values, float32, to the merged ones; it may write into what it is given."""


def empty_model(base: Path) -> PreTrainedModel:
    """The base's architecture on the meta device."""
    config = read_config(base)
    if "quantization_config" in config:
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def merge(
    base: Path,
    adapter: AdapterFiles,
    model: PreTrainedModel,
    out: Path,
    *,
    dtype: torch.dtype,
    tick: Callable[[int, int], None],
    shard_bytes: int = 4 * 10**9,
) -> Merged:
    """Writes the merged model into the folder `out`, which may hold whole shards of an earlier attempt.

    `tick(done, total)` is told of tensors. Raises ModelError when part of the adapter fits no tensor of the base.
    """
    form = read_format(read_config(base), source=str(base))
    shards = Shards(base, sorted(file.name for file in base.glob("*.safetensors")))
    weights = weights_of(shards, model, form)
    pieces = dict(_pieces(weights, adapter, sources_of(shards, form)))
    planned = {name: _planned(piece, dtype) for name, piece in pieces.items()}
    out.mkdir(parents=True, exist_ok=True)
    files = plan_shards(planned, shard_bytes=shard_bytes)
    done, watch = 0, _Watch()
    for shard in files:
        if not shard.is_complete(out):
            tensors = _tensors(shard, pieces, dtype, watch)
            write_shard(out, shard, _told(tensors, tick, done=done, total=len(pieces)))
        done += len(shard.tensors)
    write_index(out, files)
    _write_config(base, adapter, model, out, dtype=dtype)
    return Merged(
        folder=out,
        tensors=len(pieces),
        updated=sum(piece.update is not None or piece.value is not None for piece in pieces.values()),
        bytes=sum(p.bytes for p in planned.values()),
        rounding=watch.rounding(),
    )


def _pieces(weights: list[Weight], adapter: AdapterFiles, sources: dict[str, Source]) -> Iterator[tuple[str, _Piece]]:
    """Every tensor of the output by its name in the base's files, in their order, then what the adapter adds."""
    by_source: dict[str, tuple[Weight, str, int]] = {}
    for weight in weights:
        for pattern, many in weight.sources.items():
            for index, source in enumerate(many):
                by_source[source.name] = (weight, pattern, index)
    used: set[str] = set()
    for name, source in sources.items():
        if name not in by_source:  # such as layers that transformers does not build; they are carried along
            yield name, _Piece(source, None, None)
            continue
        weight, pattern, index = by_source[name]
        for target in weight.targets:
            if target in adapter.replaced:
                used.add(target)
                if weight.converter is not None:
                    raise ModelError(
                        f"{adapter.folder}: {target} is trained whole, but lies in several tensors of the base"
                    )
                yield name, _Piece(None, adapter.replaced[target], None)
                break
            if target in adapter.low_rank:
                used.add(target)
                yield name, _updated(weight, source, pattern, index, adapter.low_rank[target])
                break
        else:
            yield name, _Piece(source, None, None)
    if adapter.unties:
        # The files hold one weight for both: the other is written out, as it was trained or as the base has it.
        [shared] = [name for name in sources if name in by_source and by_source[name][0].target in adapter.tied]
        other = adapter.tied[by_source[shared][0].target]
        value = adapter.replaced.get(other)
        used |= {other} & adapter.replaced.keys()
        yield other, _Piece(None, value, None) if value is not None else _Piece(sources[shared], None, None)
    if missing := sorted((adapter.low_rank.keys() | adapter.replaced.keys()) - used):
        raise ModelError(
            f"{adapter.folder}: {len(missing)} of its updates fit no tensor in the base's files, the first is "
            f"{missing[0]}; the base is incomplete, or not the one the adapter was trained on"
        )


def _updated(weight: Weight, source: Source, pattern: str, index: int, low: LowRank) -> _Piece:
    """The part of the update that falls on this tensor of the files."""
    if weight.converter is None:
        return _Piece(source, None, lambda base: _apply(base, low))
    if not weight.stacks_experts:
        raise ModelError(f"{weight.target}: its conversion from the base's files is not known here; merge it with PEFT")
    turned = any(isinstance(operation, Transpose) for operation in weight.converter.operations)
    axis = next((op.dim - 1 for op in weight.converter.operations if isinstance(op, Concatenate)), 0)
    assert isinstance(weight.converter.operations[0], MergeModulelist)
    start = 0
    for name, many in weight.sources.items():
        if name == pattern:
            break
        start += many[index].shape[1 - axis if turned else axis]
    length = source.shape[1 - axis if turned else axis]

    def update(base: Tensor) -> Tensor:
        part = low.delta(index).narrow(axis, start, length)
        return base + (part.T if turned else part)

    return _Piece(source, None, update)


def _apply(base: Tensor, low: LowRank) -> Tensor:
    """The merged weight; `base` float32, [out, in], or [E, …], which is updated in place, expert by expert."""
    if low.a.dim() == 3:
        for expert in range(len(base)):
            base[expert] += low.delta(expert)
        return base
    merged = base + low.delta()
    if low.magnitude is None:
        return merged
    # DoRA (arXiv 2402.09353): each row has the direction of the sum and the length that was trained.
    return merged * (low.magnitude.float() / merged.norm(dim=1))[:, None]


def _some_rows(tensor: Tensor) -> Tensor:
    """A copy of WATCHED_ROWS rows, spread over the tensor: [rows, in]."""
    rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[:, None]
    return rows[torch.linspace(0, len(rows) - 1, min(WATCHED_ROWS, len(rows))).long()]


class _Watch:
    """Collects what rounding does to updates, in some rows of each tensor."""

    def __init__(self) -> None:
        self.lost: list[float] = []
        self.same = self.values = 0

    def see(self, base: Tensor, exact: Tensor, rounded: Tensor) -> None:
        moved = (exact - base).norm().item()
        if moved:
            self.lost.append((rounded.float() - exact).norm().item() / moved)
            self.same += int((rounded == base.to(rounded.dtype)).sum())
            self.values += rounded.numel()

    def rounding(self) -> Rounding:
        if not self.lost:
            return Rounding(lost=0.0, unchanged=0.0)
        return Rounding(lost=statistics.median(self.lost), unchanged=self.same / self.values)


def _told(
    tensors: Iterator[tuple[str, Tensor]], tick: Callable[[int, int], None], *, done: int, total: int
) -> Iterator[tuple[str, Tensor]]:
    for count, named in enumerate(tensors, start=done + 1):
        yield named
        tick(count, total)


def _tensors(
    shard: Shard, pieces: dict[str, _Piece], dtype: torch.dtype, watch: _Watch
) -> Iterator[tuple[str, Tensor]]:
    for name in shard.tensors:
        piece, planned = pieces[name], shard.tensors[name]
        if piece.value is not None:
            yield name, piece.value.to(planned.dtype)
        elif piece.source is not None and piece.update is None:
            yield name, piece.source.read(dtype).to(planned.dtype)
        elif piece.source is not None and piece.update is not None:
            base = piece.source.read(torch.float32).float()
            before = _some_rows(base)
            exact = piece.update(base)
            if not torch.stack(exact.aminmax()).isfinite().all():  # one pass over the tensor; NaN is kept
                raise ModelError(f"{name}: the merged weight holds NaN or infinite values; base or adapter is broken")
            rounded = exact.to(planned.dtype)
            watch.see(before, _some_rows(exact), _some_rows(rounded))
            yield name, rounded


def _planned(piece: _Piece, dtype: torch.dtype) -> Planned:
    if piece.value is not None:
        return Planned(tuple(piece.value.shape), dtype if piece.value.is_floating_point() else piece.value.dtype)
    assert piece.source is not None
    kind = INTEGERS.get(piece.source.shards.kind(piece.source.name)) if not piece.source.small_bytes else None
    return Planned(tuple(piece.source.shape), kind or dtype)


def _write_config(base: Path, adapter: AdapterFiles, model: PreTrainedModel, out: Path, *, dtype: torch.dtype) -> None:
    """config.json of the base without its quantisation, and the tokenizer, the adapter's own where it has one."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = str(dtype).removeprefix("torch.")
        if "tie_word_embeddings" in part and adapter.unties:
            part["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for source in (base, adapter.folder):
        for pattern in COPIED:
            for file in source.glob(pattern):
                shutil.copyfile(file, out / file.name)
