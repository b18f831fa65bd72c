"""Loading tensor by tensor: each weight is read from its shard, put into the architecture's form, quantised, dropped.

transformers' own tables say how a checkpoint's tensors become the architecture's (many experts into one stack, and the
like); here they are applied to one weight at a time, and to an expert stack one expert at a time, so that beside what
stays there is never more than the dense form of one matrix (of one stack, where a conversion mixes experts).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import EllipsisType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from gatewright.model.fp8 import Fp8Weight
from gatewright.model.sources import FLOATS, Fp8Source, Shards, Source, StoredFormat, sources_of
from gatewright.spec.errors import ModelError

Index = EllipsisType | tuple[slice, ...]
"""What is read of a weight: all, or the part that a placement gives this process, cut along the first axis."""


@dataclass(slots=True)
class Weight:
    """What becomes one weight of the architecture (several, where a conversion splits): sources by pattern."""

    target: str
    model: PreTrainedModel
    """On the meta device: the architecture."""
    converter: WeightConverter | None
    sources: dict[str, list[Source]] = field(default_factory=dict)

    @property
    def all_sources(self) -> list[Source]:
        return [source for sources in self.sources.values() for source in sources]

    @property
    def is_fp8(self) -> bool:
        return all(isinstance(source, Fp8Source) for source in self.all_sources)

    @property
    def targets(self) -> list[str]:
        """Names of the weights that the conversion gives."""
        if self.converter is None:
            return [self.target]
        first, *others = self.converter.target_patterns
        return [self.target] + [self.target.replace(first, other) for other in others]

    @property
    def shape(self) -> torch.Size:
        return self.model.get_parameter(self.target).shape

    def shape_of(self, target: str) -> torch.Size:
        """Of the whole of a weight, or a buffer."""
        owner, _, name = target.rpartition(".")
        module = self.model.get_submodule(owner)
        tensor = module._parameters.get(name)
        return (module._buffers[name] if tensor is None else tensor).shape  # type: ignore[union-attr]

    def rows(self, target: str) -> range:
        """The entries of a weight's first axis that a placement gives this process; all where there is none."""
        owner, _, name = target.rpartition(".")
        parameter = self.model.get_submodule(owner)._parameters.get(name)
        if not isinstance(parameter, DTensor):
            return range(len(parameter)) if parameter is not None and parameter.dim() else range(1)
        layout = (parameter.shape, parameter.device_mesh, parameter.placements)
        (count, *_), (first, *_) = compute_local_shape_and_global_offset(*layout)
        return range(first, first + count)

    @property
    def small_bytes(self) -> float:
        """Bytes of 4- and 8-bit codes in the files for the entries of `rows`."""
        small = sum(source.small_bytes for source in self.all_sources)
        return small * len(self.rows(self.target)) / max(1, self.shape[0]) if small else 0.0

    def whole(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights in plain floats, by name; `dtype` is for what is FP8 in the file."""
        return self.convert({pattern: [s.read(dtype) for s in sources] for pattern, sources in self.sources.items()})

    def matrices(self, target: str, dtype: torch.dtype, rows: range) -> Iterator[Tensor]:
        """One of the weights as a matrix, or as those of these rows of a stack, each read when it is asked for.

        In the type of the file, or in `dtype` from FP8. Raises ModelError for another shape than config.json says.
        """
        shape = self.model.get_parameter(target).shape
        if len(shape) == 3 and self.converter is None:
            [source] = self.all_sources
            self.agree(source.shape, shape)
            made: Iterable[Tensor] = (source.read(dtype, row) for row in rows)
        elif len(shape) == 3 and self.stacks_experts:
            self._count(shape[0])
            made = (self._expert(index, dtype) for index in rows)
        else:
            whole = self.whole(dtype)[target]
            self.agree(whole.shape, shape)
            made = whole[rows.start : rows.stop] if len(shape) == 3 else whole[None]
        for matrix in made:
            self.agree(matrix.shape, shape[-2:])
            yield matrix

    @property
    def stacks_experts(self) -> bool:
        """Whether each expert of the stack comes from its own sources alone."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(_within_expert(op) for op in others)

    @property
    def comes_by_expert(self) -> bool:
        """Whether `matrices` gives the weight in parts without having read it whole."""
        return self.stacks_experts or (self.converter is None and len(self.all_sources[0].shape) == 3)

    def fp8(self, rows: range) -> Fp8Weight:
        """The matrix, or these rows of the stack, in the checkpoint's own FP8 bytes.

        Raises ModelError where a conversion does more than stack.
        """
        if self.converter is None:
            [source] = self.all_sources
            self.agree(source.shape, self.shape)
            return _fp8(source) if len(self.shape) < 3 else self._fp8_stack(lambda row: _fp8(source, row), rows)
        if not self.stacks_experts or any(isinstance(op, Transpose) for op in self.converter.operations):
            raise ModelError(
                f"{self.target}: transformers rearranges this weight at load, so its FP8 blocks cannot stay; set "
                "method.quantize: nf4, or none"
            )
        self._count(self.shape[0])
        return self._fp8_stack(self._fp8_expert, rows)

    def _fp8_stack(self, expert_of: Callable[[int], Fp8Weight], rows: range) -> Fp8Weight:
        parts: dict[str, Tensor] = {}
        for place, index in enumerate(rows):
            expert = expert_of(index)
            self.agree(expert.shape, self.shape[1:])
            for name, part in expert.parts.items():
                parts.setdefault(name, part.new_empty(len(rows), *part.shape))[place] = part
        shape = torch.Size([len(rows), *self.shape[1:]])
        return Fp8Weight(parts, shape=shape, dtype=torch.bfloat16, block=expert.block)

    def _fp8_expert(self, index: int) -> Fp8Weight:
        """One expert of a stack; its scales are put together as its codes are."""
        parts = {pattern: _fp8(sources[index]).refined() for pattern, sources in self.sources.items()}
        blocks = {part.block for part in parts.values()}
        if len(blocks) > 1:
            raise ModelError(f"{self.target}: its parts have FP8 blocks of different shapes; set method.quantize: nf4")
        # As bytes: not every operation that transformers' tables may name is there for 8-bit floats.
        codes = self.convert({pattern: [part.parts["codes"].view(torch.uint8)] for pattern, part in parts.items()})
        scale = self.convert({pattern: [part.parts["scale"]] for pattern, part in parts.items()})
        kind = next(iter(parts.values())).parts["codes"].dtype
        made = {"codes": codes[self.target][0].view(kind), "scale": scale[self.target][0]}
        return Fp8Weight(made, shape=made["codes"].shape, dtype=torch.bfloat16, block=blocks.pop())

    def convert(self, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """transformers' conversion of these tensors; by name of what it gives."""
        if self.converter is None:
            [[tensor]] = tensors.values()
            return {self.target: tensor}
        converter = deepcopy(self.converter)
        for pattern, many in tensors.items():
            for index, tensor in enumerate(many):
                converter.add_tensor(self.target, f"{pattern}.{index}", pattern, lambda tensor=tensor: tensor)
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _expert(self, index: int, dtype: torch.dtype) -> Tensor:
        one = {pattern: [sources[index].read(dtype)] for pattern, sources in self.sources.items()}
        return self.convert(one)[self.target][0]

    def agree(self, got: Sequence[int], wanted: Sequence[int]) -> None:
        if tuple(got) != tuple(wanted):
            raise ModelError(
                f"{self.target} has another shape than config.json says: {tuple(got)} in the file, {tuple(wanted)} by "
                "config.json; these files do not belong together"
            )

    def _count(self, wanted: int) -> None:
        counts = {len(sources) for sources in self.sources.values()}
        if counts != {wanted}:
            raise ModelError(
                f"{self.target}: the files hold {' and '.join(map(str, sorted(counts)))} experts, config.json says "
                f"{wanted}; the folder is incomplete, or its parts do not belong together"
            )


class Lazy:
    """Stands for a tensor in a state dict; transformers takes `[...]` of it, or its part, when its turn has come."""

    turn = threading.Lock()
    """transformers reads with several threads: one dense weight at a time is enough."""

    def __init__(self, make: Callable[[Index], Tensor], shape: torch.Size) -> None:
        self.make = make
        self.shape = shape

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Index) -> Tensor:
        with self.turn:
            return self.make(index)


def weights_of(shards: Shards, model: PreTrainedModel, form: StoredFormat | None) -> list[Weight]:
    """Every weight of the architecture that the files hold, in order of name. `model` lies on the meta device.

    Raises ModelError for a tensor in a type that is no float and no FP8 with its scale.
    """
    known = model.state_dict()
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    weights: dict[str, Weight] = {}
    sources = sources_of(shards, form)
    for key in sorted(sources, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if target not in known:
            continue
        source = sources[key]
        if not source.small_bytes and not _is_number(shards.kind(key), known[target]):
            raise ModelError(
                f"{shards.folder}: {key} is stored as {shards.kind(key)} without a scale we know; wanted plain floats, "
                "FP8 with weight_scale_inv or weight_scale, or MXFP4 blocks"
            )
        weight = weights.setdefault(target, Weight(target, model, by_pattern[pattern] if pattern else None))
        weight.sources.setdefault(pattern or key, []).append(source)
    return list(weights.values())


def _within_expert(operation: object) -> bool:
    """Whether the operation leaves the first axis of a stack alone, and does not ask for the whole stack's shape."""
    if isinstance(operation, Transpose):
        return 0 not in (operation.dim0, operation.dim1) and not operation.check_dims
    return isinstance(operation, Concatenate) and operation.dim != 0


def _fp8(source: Source, row: int | None = None) -> Fp8Weight:
    assert isinstance(source, Fp8Source)
    return source.weight(row)


def _is_number(kind: str, parameter: Tensor) -> bool:
    """Whether what is stored as `kind` can be this weight as it is."""
    return kind in FLOATS or not parameter.is_floating_point()
