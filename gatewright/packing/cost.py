"""Seconds that documents and their shares cost a rank in one micro-batch: what schedules are scored and balanced by.

A share is the part of a document that one rank holds. Shares are cut in mirrored pairs of chunks (`mirrored` in
schedule.py), which makes attention as proportional to the tokens of a share as everything else is:

    chunks [a, b) and [s − b, s − a) of s tokens: 2 (b − a) tokens, and (b − a) · s pairs under the causal mask

so a share of x tokens costs x · (token_s + attention_s · s), and besides what being split costs: two ragged tiles
instead of one, and the keys and values of the other s − x tokens, which have to come from other ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from gatewright.packing.flops import ATTENTION_PASSES
from gatewright.spec.errors import UserError
from gatewright.spec.hardware import Gpu
from gatewright.spec.probe import Costs, read_probe
from gatewright.spec.shape import Attention, ModelShape

CATALOG = Path(__file__).parent.parent / "catalog" / "attention_cost.json"
Numbers = TypeVar("Numbers", float, npt.NDArray[Any])
"""One or an array of them."""
BYTES = 2
"""Of an activation."""
LINEAR_PASSES = 3.0
"""Forward, and twice that backward; with adapters and full recomputation it is three forwards as well."""
EXCHANGES = 3
"""Keys and values forward, the same again backward, and their gradients on the way home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine reaches in training; the catalogue says for each whether it was measured or assumed."""

    gpu: str
    linear_flops_per_s: float
    expert_flops_per_s: float
    """Grouped products of experts."""
    attention_flops_per_s: float
    """Forward and backward together."""
    near_bytes_per_s: float
    """Of a rank, to ranks of its node."""
    far_bytes_per_s: float
    hidden: float
    """Share of the exchange that runs beside computation."""
    hop_s: float
    """Latency of an exchange for each further rank in it."""
    slot_s: float
    """Fixed cost of a micro-batch: launches, gathers that nothing hides."""
    tile_tokens: int
    """Rows of an attention tile: a chunk ends in a tile that is on average half empty, at both of its sides."""
    ranks_per_node: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one rank. Everything the scheduler knows of model and machine."""

    token_s: float
    """Of a token in everything but full attention: matrices, experts and their all-to-all, windowed attention."""
    attention_s: float
    """Of a token for each token of its document: a document of s tokens has attention_s · s²."""
    near_s: float
    """Of receiving one token's keys and values (and returning their gradient) within a node, as far as it shows."""
    far_s: float
    """The same between nodes; the whole group pays it when it spans two."""
    hop_s: float
    """For each rank beyond the first of the largest group a rank is in."""
    slot_s: float
    """Of a micro-batch, whatever is in it."""
    ranks_per_node: int
    tile_tokens: int = 128
    exchange_bytes: int = 0
    """Of one token's keys and values, forward and backward together."""

    def rate(self, tokens: Numbers) -> Numbers:
        """Seconds of one token of a document of `tokens` tokens."""
        seconds: Numbers = tokens * self.attention_s + self.token_s
        return seconds

    def whole_s(self, tokens: Numbers) -> Numbers:
        """Of a document that one rank holds alone."""
        seconds: Numbers = tokens * self.token_s + tokens * (tokens + self.tile_tokens) * self.attention_s
        return seconds

    def split_s(self, tokens: Numbers) -> Numbers:
        """What a share costs besides its tokens, before any exchange: four half-empty tiles where a whole has two."""
        return tokens * (2 * self.attention_s * self.tile_tokens)

    def exchange_s(self, first_rank: Numbers, last_rank: Numbers) -> Numbers:
        """Of one token received in a group that reaches from one rank to the other."""
        far = first_rank // self.ranks_per_node != last_rank // self.ranks_per_node
        seconds: Numbers = far * (self.far_s - self.near_s) + self.near_s
        return seconds

    def share_s(self, tokens: Numbers, share: Numbers, exchange_s: Numbers) -> Numbers:
        """Of a share of a document that other ranks hold the rest of."""
        seconds: Numbers = share * self.rate(tokens) + self.split_s(tokens) + (tokens - share) * exchange_s
        return seconds


def cost_model(
    shape: ModelShape, rates: Rates, *, ranks_per_node: int | None = None, expert_ranks: int = 1
) -> CostModel:
    """Of a model on a machine. `expert_ranks`: ranks the experts are spread over; each token goes to them and back."""
    forward = sum(linear.flops_per_token for group in shape.groups if group.role != "mtp" for linear in group.linears)
    experts = sum(
        linear.flops_per_token for group in shape.groups if group.role == "routed_experts" for linear in group.linears
    )
    dense = forward - experts + (2 * shape.vocab * shape.hidden if shape.tied else 0)
    mixers = [layer.attention for layer in shape.layers if layer.attention is not None]
    visits = sum(layer.mlp.top_k for layer in shape.layers if layer.mlp is not None and layer.mlp.experts)
    per_node = ranks_per_node or rates.ranks_per_node
    to_experts = 2 * LINEAR_PASSES * visits * shape.hidden * BYTES * (1 - 1 / expert_ranks)
    link = rates.near_bytes_per_s if expert_ranks <= per_node else rates.far_bytes_per_s
    exchange_bytes = EXCHANGES * BYTES * sum(mixer.cache_elements_per_token for mixer in mixers)
    shown_bytes = exchange_bytes * (1 - rates.hidden)
    return CostModel(
        token_s=LINEAR_PASSES * dense / rates.linear_flops_per_s
        + LINEAR_PASSES * experts / rates.expert_flops_per_s
        + to_experts / link
        + ATTENTION_PASSES * sum(bounded_flops(mixer) for mixer in mixers) / rates.attention_flops_per_s,
        attention_s=ATTENTION_PASSES * sum(growing_flops(mixer) for mixer in mixers) / rates.attention_flops_per_s,
        near_s=shown_bytes / rates.near_bytes_per_s,
        far_s=shown_bytes / rates.far_bytes_per_s,
        hop_s=EXCHANGES * sum(mixer.kind != "linear" for mixer in mixers) * rates.hop_s * (1 - rates.hidden),
        slot_s=rates.slot_s,
        ranks_per_node=per_node,
        tile_tokens=rates.tile_tokens,
        exchange_bytes=exchange_bytes,
    )


def growing_flops(mixer: Attention) -> float:
    """Forward FLOPs of a token for each token of its document, where that grows without bound; half under the mask."""
    if mixer.kind == "linear" or (mixer.window_tokens is not None and mixer.compression == 1):
        return 0.0
    indexer = mixer.index_heads * mixer.index_dim / mixer.compression
    if mixer.index_top_k is not None:
        return float(indexer)
    return mixer.heads * (mixer.qk_dim + mixer.v_dim) / mixer.compression + indexer


def bounded_flops(mixer: Attention) -> float:
    """Forward FLOPs of a token in attention that looks back a bounded way, taken as that far."""
    width = 2.0 * mixer.heads * (mixer.qk_dim + mixer.v_dim)
    if mixer.kind == "linear":
        return 6.0 * mixer.heads * mixer.qk_dim * mixer.v_dim
    return width * ((mixer.window_tokens or 0) + (mixer.index_top_k or 0))


def find_rates(gpu: Gpu) -> Rates:
    """Of a GPU that the catalogue has rates for; of another, its maker's row scaled by the peak bf16 rate."""
    rows = catalogue()
    if gpu.name in rows:
        return rates(rows[gpu.name])
    like = rates(rows["h200" if gpu.vendor != "amd" else "mi300x"])
    peak = gpu.bf16_flops_per_s / float(rows[like.gpu]["peak_flops_per_s"])
    return Rates(
        gpu=gpu.name,
        linear_flops_per_s=like.linear_flops_per_s * peak,
        expert_flops_per_s=like.expert_flops_per_s * peak,
        attention_flops_per_s=like.attention_flops_per_s * peak,
        near_bytes_per_s=0.5 * gpu.link_bytes_per_s,
        far_bytes_per_s=0.8 * gpu.network_bytes_per_s,
        hidden=like.hidden,
        hop_s=like.hop_s,
        slot_s=like.slot_s,
        tile_tokens=like.tile_tokens,
        ranks_per_node=gpu.per_node,
        source=f"scaled from {like.gpu} by the peak bf16 rate; {like.source}",
    )


@cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Rows of attention_cost.json by GPU."""
    return {row["gpu"]: row for row in json.loads(CATALOG.read_bytes())["rates"]}


def rates(row: Mapping[str, Any]) -> Rates:
    return Rates(**{key: value for key, value in row.items() if key != "peak_flops_per_s"})


def cpu_rates() -> Rates:
    """Of one CPU core, as measured once; a probe of the machine replaces them."""
    return rates(catalogue()["cpu"])


def device_rates(device: str) -> Rates:
    """Of a device by the name that its driver gives, such as `NVIDIA H200`.

    Of one that the catalogue lacks, its maker's; only their ratios steer a schedule. A name of no GPU is a CPU's.
    """
    name = device.lower()
    if name.startswith("cpu"):  # its architecture may be amd64
        return cpu_rates()
    for row, words in {"mi250x-gcd": ("mi250",), "mi300x": ("mi3", "amd"), "h200": ("nvidia",)}.items():
        if any(word in name for word in words):
            return rates(catalogue()[row])
    return cpu_rates()


def read_rates(probe: Path) -> Rates:
    """Those of a probe.json. Raises UserError for a file that is none, or has no costs in it."""
    found = read_probe(probe)
    if found.costs is None:
        outcome = found.outcome("costs")
        why = f" ({outcome.status}: {outcome.text})" if outcome else ""
        raise UserError(
            f"{probe}: no measured costs in it{why}; `gatewright probe --attention --out {probe}` makes them"
        )
    return measured_rates(found.costs)


def measured_rates(costs: Costs) -> Rates:
    """What a probe measured. What it could not, such as links of a single device, is the catalogue's for the device.

    The trainer exchanges keys and values before it attends, so nothing of a measured exchange counts as hidden.
    """
    like = device_rates(costs.device)
    linked = costs.bytes_per_s is not None and costs.hop_s is not None
    near = costs.bytes_per_s or like.near_bytes_per_s
    return replace(
        like,
        linear_flops_per_s=costs.linear_flops_per_s,
        expert_flops_per_s=costs.expert_flops_per_s or costs.linear_flops_per_s,
        attention_flops_per_s=costs.attention_flops_per_s,
        tile_tokens=costs.tile_tokens,
        slot_s=costs.slot_s or like.slot_s,
        near_bytes_per_s=near,
        far_bytes_per_s=min(near, like.far_bytes_per_s) if like.gpu != "cpu" else near,
        hop_s=like.hop_s if costs.hop_s is None else costs.hop_s,
        hidden=0.0 if linked else like.hidden,
        source=f"measured by a probe of {costs.device}, {costs.dtype}"
        + (f", {costs.ranks} ranks" if linked else f"; links: {like.source}"),
    )
