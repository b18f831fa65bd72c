"""What attention, products and the exchange of keys and values cost on this machine: the cost model's coefficients.

Attention is timed at a few (document length, ranks that share it) points: the share of one rank, forward and backward,
by the function that the trainer attends from slices with. The seconds of x tokens of a document of s tokens are fitted
by a · x · s for the work and b · s for each pair of ends of its chunks, whose tiles are half empty (packing/cost.py).
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gatewright.model.attention import choose_kernel
from gatewright.model.attention_slices import SliceAttention, bounds_of
from gatewright.packing.flops import ATTENTION_PASSES
from gatewright.packing.schedule import mirrored
from gatewright.packing.schedule_score import even_shares
from gatewright.probe.attention import Heads, heads_of
from gatewright.probe.children import Wanted
from gatewright.probe.links import Links, measure_links
from gatewright.spec.errors import ModelError
from gatewright.spec.probe import CostPoint, Costs

LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 4096, 16_384)}
RANKS = (1, 2, 4)
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""What runs train in on each."""
ROWS = {"cpu": 512, "cuda": 8192}
"""Tokens of the products that are timed."""
MOST_WIDTH = {"cpu": 2048, "cuda": 8192}
EXPERTS = 8
REPEATS = 3
PRODUCTS = 7
"""Of a layer: queries, keys, values, output, gate, up, down."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Of a model's layers, for the products that are timed."""

    hidden: int = 1024
    inner: int = 2048
    expert_inner: int | None = None
    layers: int | None = None


def measure_costs(wanted: Wanted) -> tuple[str, dict[str, object]]:
    heads, widths = Heads(), Widths()
    if wanted.model:
        heads, widths = heads_of(Path(wanted.model)), widths_of(Path(wanted.model))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())  # a rank of a CPU has a core
    timed = {
        (tokens, ranks): attention_s(heads, tokens, ranks, device=device)
        for tokens in LENGTHS[device.type]
        for ranks in RANKS
    }
    each_s, tile_tokens, points = fitted(timed)
    links = measure_links()
    costs = Costs(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(DTYPES[device.type]).removeprefix("torch."),
        linear_flops_per_s=linear_rate(widths, device=device),
        expert_flops_per_s=expert_rate(widths, device=device) if widths.expert_inner else None,
        attention_flops_per_s=ATTENTION_PASSES * heads.query * (heads.qk_dim + heads.v_dim) / each_s,
        tile_tokens=tile_tokens,
        slot_s=widths.layers * launch_s(heads, device=device) if widths.layers else None,
        ranks=links.ranks if links else 1,
        bytes_per_s=links.bytes_per_s if links else None,
        hop_s=links.hop_s if links else None,
        points=points,
    )
    return in_words(costs, links), asdict(costs)


def widths_of(folder: Path) -> Widths:
    """From the model's config.json. Raises ModelError where they are not there."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        values = json.loads(path.read_bytes())
        text: Mapping[str, Any] = values.get("text_config") or values
        hidden, chosen = int(text["hidden_size"]), text.get("num_experts_per_tok") or text.get("moe_topk")
        inner = int(text.get("intermediate_size") or text.get("moe_intermediate_size") or 4 * hidden)
        expert = int(text.get("moe_intermediate_size") or inner) if chosen else None
        return Widths(hidden=hidden, inner=inner, expert_inner=expert, layers=int(text["num_hidden_layers"]))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} does not say the widths of its layers: {type(error).__name__}: {error}") from None


def attention_s(heads: Heads, tokens: int, ranks: int, *, device: torch.device) -> float:
    """Of the first rank's share of a document that so many ranks share, forward and backward."""
    chunks = mirrored(even_shares(tokens, ranks))[0]
    queries, keys = [end - start for start, end in chunks], [end for _, end in chunks]
    q = random(1, heads.query, sum(queries), heads.qk_dim, device=device)
    k = random(1, heads.key, sum(keys), heads.qk_dim, device=device)
    v = random(1, heads.key, sum(keys), heads.v_dim, device=device)
    kernel, bounds = choose_kernel(device, q.dtype), bounds_of(queries, keys, device)
    attend = SliceAttention(heads.qk_dim**-0.5, None, kernel.attend_slices, kernel.equal_widths)
    return seconds(lambda: attend(q, k, v, bounds), (q, k, v), device=device)


def fitted(timed: Mapping[tuple[int, int], float]) -> tuple[float, int, list[CostPoint]]:
    """Seconds of a token for each token of its document, rows of a tile, and each point beside the fit.

    Least squares of relative errors; a tile of fewer than no rows is none.
    """
    work = np.array([tokens * (tokens / ranks) for tokens, ranks in timed])
    ends = np.array([tokens * (1.0 if ranks == 1 else 2.0) for tokens, ranks in timed])
    taken = np.array(list(timed.values()))
    each_s, end_s = np.linalg.lstsq(np.stack([work, ends], axis=1) / taken[:, None], np.ones(len(taken)), rcond=None)[0]
    if end_s < 0 or each_s <= 0:
        each_s, end_s = (work / taken).sum() / ((work / taken) ** 2).sum(), 0.0
    points = [
        CostPoint(
            tokens=tokens, ranks=ranks, seconds=float(taken[i]), fitted_s=float(each_s * work[i] + end_s * ends[i])
        )
        for i, (tokens, ranks) in enumerate(timed)
    ]
    return float(each_s), round(end_s / each_s), points


def linear_rate(widths: Widths, *, device: torch.device) -> float:
    """FLOP/s of a dense product, forward and both gradients."""
    rows, most = ROWS[device.type], MOST_WIDTH[device.type]
    hidden, inner = min(widths.hidden, most), min(widths.inner, most)
    x, w = random(rows, hidden, device=device), random(hidden, inner, device=device)
    return 6.0 * rows * hidden * inner / seconds(lambda: x @ w, (x, w), device=device)


def expert_rate(widths: Widths, *, device: torch.device) -> float:
    """FLOP/s of a grouped product of experts that get equally many tokens, forward and both gradients."""
    rows, most = ROWS[device.type], MOST_WIDTH[device.type]
    hidden, inner = (16 * max(1, min(width, most) // 16) for width in (widths.hidden, widths.expert_inner or 16))
    x, w = random(rows, hidden, device=device), random(EXPERTS, hidden, inner, device=device)
    ends = torch.arange(1, EXPERTS + 1, device=device, dtype=torch.int32) * (rows // EXPERTS)
    return 6.0 * rows * hidden * inner / seconds(lambda: F.grouped_mm(x, w, offs=ends), (x, w), device=device)


def launch_s(heads: Heads, *, device: torch.device) -> float:
    """Of a layer's products and attention of a single token: what a micro-batch costs whatever is in it."""
    x, w = random(1, 16, device=device), random(16, 16, device=device)
    return PRODUCTS * seconds(lambda: x @ w, (x, w), device=device) + attention_s(heads, 1, 1, device=device)


def random(*shape: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, DTYPES[device.type]).requires_grad_()


def seconds(work: Callable[[], Tensor], inputs: tuple[Tensor, ...], *, device: torch.device) -> float:
    """The best of a few times of a result and its gradients, after one that warms up; on a CPU processor time."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    taken = []
    for _ in range(1 + REPEATS):
        wait_for(device)
        begun = clock()
        out = work()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        wait_for(device)
        taken.append(clock() - begun)
    return max(min(taken[1:]), 1e-9)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_words(costs: Costs, links: Links | None) -> str:
    worst = max(abs(point.fitted_s / point.seconds - 1) for point in costs.points)
    rates = [f"products {costs.linear_flops_per_s / 1e9:,.0f}"]
    if costs.expert_flops_per_s:
        rates.append(f"experts {costs.expert_flops_per_s / 1e9:,.0f}")
    rates.append(f"attention {costs.attention_flops_per_s / 1e9:,.0f} GFLOP/s")
    link = "one device: no exchange to time"
    if links:
        rate = f"{links.bytes_per_s / 1e9:.2f} GB/s, {links.hop_s * 1e6:.0f} µs a hop"
        link = f"{links.backend}, {links.ranks} ranks: {rate}"
    return (
        f"{costs.dtype}: {', '.join(rates)}, tiles of {costs.tile_tokens} rows; {len(costs.points)} points, the fit is "
        f"off by {worst:.0%} at most; {link}"
    )
