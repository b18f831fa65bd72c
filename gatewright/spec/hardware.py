"""Hardware: a GPU as its driver sees it, a node of them, a cluster of nodes, and what an hour of one costs."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30
GB = 10**9

Vendor = Literal["nvidia", "amd", "intel", "apple", "cpu"]
PriceKind = Literal["low", "typical", "hyperscaler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A listed range of on-demand prices; never an offer."""

    kind: PriceKind
    low_usd: float
    """US dollars an hour for one device of the catalogue (one GCD of an MI250X)."""
    high_usd: float
    date: str
    """Month or day the source was read: 2026-05 or 2026-05-18."""
    source: str

    @property
    def usd_per_hour(self) -> float:
        """Middle of the range."""
        return (self.low_usd + self.high_usd) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device as torch counts it: a GCD on MI250X, a whole card elsewhere."""

    name: str
    """Key in run files: h200, mi250x-gcd."""
    title: str
    vendor: Vendor
    architecture: str
    """sm_90, gfx942: what kernels are built for."""
    memory_bytes: int
    """What the driver prints as the device's total, less than the number sold."""
    memory_source: str
    """Where the driver's number was seen; `assumed` when it was derived from a sister product."""
    bandwidth_bytes_per_s: float
    """Of the device's memory, peak."""
    bf16_flops_per_s: float
    """Dense matrix rate, peak, no sparsity."""
    fp8_flops_per_s: float | None
    """None: no fp8 matrix units."""
    link_bytes_per_s: float
    """To the other GPUs of its node, one direction, per GPU, peak."""
    link: str
    """NVLink 4, Infinity Fabric, PCIe 4.0 x16 …"""
    network_bytes_per_s: float
    """To other nodes, one direction, per GPU, in the usual machine."""
    network: str
    per_node: int
    """GPUs in the usual node."""
    source: str
    """Data sheet of the rates."""
    device_names: tuple[str, ...] = ()
    """What torch calls the device."""
    prices: tuple[Price, ...] = ()

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB

    def price(self, kind: PriceKind = "typical") -> Price | None:
        """The row of this kind, or the nearest other one; None where no source was found."""
        order: tuple[PriceKind, ...] = (kind, "typical", "low", "hyperscaler")
        return next((price for wanted in order for price in self.prices if price.kind == wanted), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    gpu: Gpu
    gpus: int

    @property
    def memory_bytes(self) -> int:
        return self.gpus * self.gpu.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` equal nodes; ranks are numbered node by node."""

    node: Node
    nodes: int = 1

    @property
    def gpu(self) -> Gpu:
        return self.node.gpu

    @property
    def gpus(self) -> int:
        return self.nodes * self.node.gpus

    def slowest_link_bytes_per_s(self, group: int) -> float:
        """Bandwidth a group of `group` neighbouring ranks has to count with, one direction, per GPU."""
        return self.gpu.link_bytes_per_s if group <= self.node.gpus else self.gpu.network_bytes_per_s
