"""A deep model from two shallow ones: where its layers repeat, and how peaks grow with every repetition.

In a stack of equal layers the bytes alive while layer i of L is at work are linear in i (activations kept so far, or
gradients made so far) and in L. A maximum over layers is not linear, but it lies at an end of the stack: so the peak
of each block is extended on its own, counted once from the first block and once from the last, and the largest wins.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gatewright.probe.fake_memory import Peak, Segment
from gatewright.spec.errors import ModelError

Peaks = dict[Segment, Peak]


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of layers."""
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and isinstance(module[0], GradientCheckpointingLayer):
            return module
    raise ModelError(f"{type(model).__name__} has no stack of decoder layers that transformers can checkpoint")


def signatures(model: PreTrainedModel) -> list[Hashable]:
    """What each block is, for comparison: the shapes of its parameters, and its entry in every list of the config that
    has one for each layer (layer_types and kin)."""
    blocks = decoder_blocks(model)
    values = model.config.get_text_config().to_dict().values()
    lists = [value for value in values if isinstance(value, list) and len(value) == len(blocks)]
    return [
        (str([value[i] for value in lists]), tuple((n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()))
        for i, block in enumerate(blocks)
    ]


def choose_depths(blocks: Sequence[Hashable], *, multiple: int = 1, reach: int = 0) -> tuple[int, ...]:
    """Two depths that differ by whole repetitions of the pattern and begin and end like the full stack.

    `multiple`: repetitions that something outside the blocks has, such as checkpointing of every second one.
    `reach`: neighbours on either side whose bytes are alive with a block's own: where FSDP gathers ahead and reduces
    behind, a block beside the end of a shallow stack is not like one in the middle. Returns the full depth alone where
    two shallow models would save nothing.
    """
    layers = len(blocks)
    best: tuple[int, ...] = (layers,)
    for period in range(1, layers // 2 + 1):
        prefix = layers - period
        while prefix and blocks[prefix - 1] == blocks[prefix - 1 + period]:
            prefix -= 1
        step = max(2, math.lcm(period, multiple))
        least = prefix + max(step, 2 * reach)
        first = least + (layers - least) % step
        if first + step < best[-1]:
            best = (first, first + step)
    return best


def cut(model: PreTrainedModel, depth: int) -> None:
    """Leaves the first `depth` blocks."""
    del decoder_blocks(model)[depth:]
    model.config.get_text_config().num_hidden_layers = depth


def extend(
    shallow: Peaks, deep: Peaks, *, depths: tuple[int, int], blocks: Sequence[Hashable], reach: int = 0
) -> Peaks:
    """Peaks of the full stack `blocks` from those of its first depths[0] and its first depths[1] blocks."""
    step = depths[1] - depths[0]
    times = (len(blocks) - depths[0]) / step
    found: Peaks = {}
    for (phase, block), peak in shallow.items():
        if block < depths[0] - reach:
            found[phase, block] = _line(peak, deep[phase, block], times=times)
        if block >= reach and block >= 0 and blocks[block] == blocks[block + step]:  # the same distance from the end
            from_end = block + len(blocks) - depths[0]
            found[phase, from_end] = _line(peak, deep[phase, block + step], times=times)
    return found


def _line(shallow: Peak, deep: Peak, *, times: float) -> Peak:
    births = shallow.by_birth | deep.by_birth
    grown = Counter({b: line(shallow.by_birth[b], deep.by_birth[b], times=times) for b in births})
    return Peak(bytes=line(shallow.bytes, deep.bytes, times=times), operator=deep.operator, by_birth=grown)


def line(shallow: int, deep: int, *, times: float) -> int:
    """The value `times` the distance from shallow to deep away from shallow."""
    return round(shallow + (deep - shallow) * times)
