"""Token mixers the attention seam cannot reach: which they are, and how each is kept inside its documents.

Linear attention, state spaces and short convolutions carry a state along the row; some attention blocks count
positions or compress keys along it. None of them knows a boundary by itself. They run on one document at a time, as if
it were alone, or hand the boundaries to a kernel that takes them. What they are is told by their parts, not by name,
and the proofs before step 1 catch whatever escapes this file.

Shapes: T tokens, S documents.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gatewright.model import sparse_attention
from gatewright.model.document_lengths import BOUNDARIES, lengths_of, spans, tell_inside, within


@dataclass(frozen=True, slots=True)
class Mixing:
    """How one kind of token mixer honours document boundaries, and why that way."""

    name: str
    reason: str
    forward: Callable[..., Any]
    pads: bool = True
    """Whether padding on the left changes nothing, when transformers decodes several prompts at once."""


def choose_mixing(module: nn.Module, device: torch.device) -> Mixing | None:
    """How `module` is kept inside its documents; None for one that the attention seam serves, or that mixes nothing.

    The only place that chooses.
    """
    parts, settings = module._modules, vars(module)
    if "compressor" in parts:
        reason = "keys compressed over a stretch of tokens"
        return Mixing("one document at a time, with its mask", reason, _compressed_each_document, pads=False)
    if "indexer" in parts and "o_proj" in parts:
        return Mixing("on the whole row", "its indexer chooses within documents", sparse_attention.attend_without_mask)
    if "wq_b" in parts and "index_topk" in settings:
        return Mixing("one document at a time", "keys are chosen within a document", sparse_attention.choose_keys)
    if settings.get("attn_temperature_tuning") and not settings.get("use_rope", True):
        reason = "temperature grows with the place in the row"
        return Mixing("one document at a time", reason, _attend_each_document, pads=False)
    if "slope_rate" in module._buffers:
        reason = "lightning attention has no kernel with boundaries"
        return Mixing("one document at a time", reason, _scan_each_document, pads=False)
    if not any(isinstance(part, nn.Conv1d) for part in parts.values()):
        return None
    return _choose_scan(module, device)


def _choose_scan(module: nn.Module, device: torch.device) -> Mixing:
    apart = "one document at a time"
    if device.type != "cuda":
        return Mixing(apart, f"{device.type} has no kernel with boundaries", _scan_each_document)
    if "A_log" not in module._parameters:
        needed: tuple[str, ...] = ("causal_conv1d",)
    elif "head_k_dim" in vars(module):
        needed = ("causal_conv1d", "fla")
    else:
        # A state-space scan multiplies the neighbour by zero: no proof by NaN could clear it.
        return Mixing(apart, "no kernel that never touches the neighbour", _scan_each_document)
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        return Mixing(apart, f"{' and '.join(missing)} not installed", _scan_each_document)
    return Mixing(f"{' and '.join(needed)} with boundaries", "installed", _scan_with_boundaries)


def install(model: nn.Module, device: torch.device) -> None:
    """Puts each token mixer that needs it behind the forward that `choose_mixing` names.

    Blocks around such a mixer tell it the boundaries, which many of them don't hand on.
    """
    for module in model.modules():
        mixing = choose_mixing(module, device)
        if mixing is not None:
            module.forward = MethodType(mixing.forward, module)  # type: ignore[method-assign]
        elif isinstance(module, GradientCheckpointingLayer) and any(choose_mixing(m, device) for m in module.modules()):
            module.forward = MethodType(tell_inside, module)  # type: ignore[method-assign]


def takes_padding(model: nn.Module, device: torch.device) -> bool:
    """Whether prompts of unequal length can be decoded together, padded on the left."""
    mixings = (choose_mixing(module, device) for module in model.modules())
    return all(mixing is None or mixing.pads for mixing in mixings)


def describe(model: nn.Module, device: torch.device) -> list[str]:
    """One line for each kind of token mixer that the attention seam does not serve."""
    kinds = Counter(
        (type(module).__name__, mixing.name, mixing.reason)
        for module in model.modules()
        if (mixing := choose_mixing(module, device)) is not None
    )
    return [f"{count} x {kind}: {name} ({reason})" for (kind, name, reason), count in kinds.items()]


def _scan_each_document(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward on each document; the boundaries themselves are left out, it could not use them."""
    forward = type(self).forward
    lengths = lengths_of(kwargs)
    if lengths is None:
        return forward(self, *args, **kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key not in BOUNDARIES}
    # In training, Mamba's fused kernel multiplies by out_proj.weight itself, past an adapter on it.
    training, self.training = self.training, False
    try:
        with within(None):
            pieces = [_cut((args, kwargs), sum(lengths), *span) for span in spans(lengths)]
            return join([forward(self, *cut_args, **cut_kwargs) for cut_args, cut_kwargs in pieces])
    finally:
        self.training = training


def _scan_with_boundaries(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward on the whole row; its kernels take `cu_seq_lens_q` and `seq_idx`."""
    lengths = lengths_of(kwargs)
    kwargs.pop("document_lengths", None)
    if lengths is not None:
        device = next(self.parameters()).device
        document_T = [document for document, length in enumerate(lengths) for _ in range(length)]
        kwargs["seq_idx"] = torch.tensor([document_T], dtype=torch.int32, device=device)
        kwargs["cu_seq_lens_q"] = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)
    return type(self).forward(self, *args, **kwargs)


def _attend_each_document(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return attend_each_document(self, args, kwargs, mask=None)


def _compressed_each_document(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """As `_attend_each_document`, with the mask to which the module adds columns for its compressed keys."""
    return attend_each_document(self, args, kwargs, mask=sparse_attention.additive_band)


def attend_each_document(
    self: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, mask: Callable[[nn.Module, int], Tensor] | None
) -> Any:
    """An attention module's own forward on each document, with boundaries that hold that document alone."""
    forward = type(self).forward
    lengths = lengths_of(kwargs)
    if lengths is None:
        return forward(self, *args, **kwargs)
    outputs = []
    for start, end in spans(lengths):
        length = end - start
        cut_args, cut_kwargs = _cut((args, kwargs), sum(lengths), start, end)
        alone = kwargs["cu_seq_lens_q"].new_tensor((0, length))
        cut_kwargs |= dict(zip(BOUNDARIES, (alone, alone, length, length, (length,)), strict=True))
        if mask is not None:
            cut_kwargs["attention_mask"] = mask(self, length)
        with within((length,)):
            outputs.append(forward(self, *cut_args, **cut_kwargs))
    return join(outputs)


def _cut(value: Any, tokens: int, start: int, end: int) -> Any:
    """The same arguments with every tensor [1, T, …] cut to [1, end - start, …], however deep it lies."""
    if isinstance(value, Tensor):
        return value[:, start:end] if value.dim() > 1 and value.shape[1] == tokens else value
    if isinstance(value, tuple | list):
        return type(value)(_cut(item, tokens, start, end) for item in value)
    if isinstance(value, dict):
        return {key: _cut(item, tokens, start, end) for key, item in value.items()}
    return value


def join(outputs: Sequence[Any]) -> Any:
    """Outputs of the documents as one row: [1, T, …]. Of a tuple, only the first part, the hidden states, is kept."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    return torch.cat([output[0] for output in outputs], dim=1), *[None] * (len(outputs[0]) - 1)
