"""The tables that `gatewright models` and `gatewright gpus` print."""

from rich.table import Table

from gatewright.planner.catalogue import Entry, gpus, models
from gatewright.spec.hardware import GB, Price
from gatewright.spec.shape import ModelShape


def models_table() -> Table:
    """One row a model: size, active size, depth, width, experts, context, and our count against the published one."""
    table = columns(("model", "family"), ("total B", "active", "layers", "hidden", "experts", "context", "count"))
    for item in models():
        shape = item.shape()
        table.add_row(
            item.name,
            shape.family.removesuffix("_text"),
            billions(shape.parameters),
            billions(shape.active_parameters),
            str(len(shape.layers)),
            str(shape.hidden),
            f"{shape.experts}/{shape.top_k}" if shape.is_moe else "",
            thousands(shape.max_tokens) if shape.max_tokens else "",
            deviation(item, shape),
        )
    return table


def columns(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}" if parameters < 1e11 else f"{parameters / 1e9:.1f}"


def thousands(tokens: int) -> str:
    return f"{tokens / 2**20:.0f}M" if tokens >= 2**20 else f"{tokens / 1024:.0f}k"


def deviation(item: Entry, shape: ModelShape) -> str:
    """`equal`, or the difference from a published number that is rounded."""
    difference = item.counted(shape) / item.published_parameters - 1
    return "equal" if item.within == 0 and difference == 0 else f"{difference:+.1%}"


def gpus_table() -> Table:
    """One row a GPU: memory the driver reports, bandwidths, dense rates, links, and the typical price with its date."""
    numbers = ("GiB", "TB/s", "bf16 TF", "fp8 TF", "link GB/s", "net GB/s", "a node", "$/hour")
    table = columns(("gpu",), numbers)
    table.add_column("price of", no_wrap=True)
    for item in gpus():
        price = item.price()
        table.add_row(
            item.name,
            f"{item.memory_gib:.1f}",
            f"{item.bandwidth_bytes_per_s / 1e12:.2f}",
            f"{item.bf16_flops_per_s / 1e12:.0f}",
            f"{item.fp8_flops_per_s / 1e12:.0f}" if item.fp8_flops_per_s else "-",
            f"{item.link_bytes_per_s / GB:.0f}",
            f"{item.network_bytes_per_s / GB:g}",
            str(item.per_node),
            price_range(price) if price else "-",
            f"{price.kind}, {price.date}" if price else "no source",
        )
    return table


def price_range(price: Price) -> str:
    low, high = f"{price.low_usd:.2f}", f"{price.high_usd:.2f}"
    return low if low == high else f"{low}-{high}"
