"""Probe: what a machine was measured to do, one record a measurement; probe.json is this, and check judges it.

A record that is None was not measured; the outcome of its name says why. No number in here is assumed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from gatewright.spec.errors import UserError

PROBE_VERSION = 1
T = TypeVar("T")
LIMIT_BYTES = 16 * 2**20
Status = Literal["measured", "failed", "hung", "absent"]
"""failed: it ran and raised, or its process died. hung: it ran out of time and was killed. absent: there is nothing to
measure here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one measurement ended."""

    name: str
    status: Status
    text: str
    """What was read, or why nothing was, in one line."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The node, as this process may use it."""

    cpus: int
    """CPUs of the node."""
    usable_cpus: list[int]
    """Those that this process may run on."""
    memory_bytes: int
    """Of the node."""
    available_bytes: int
    """What can be had without swapping."""
    limit_bytes: int | None
    """Of the control group (container, SLURM job) that the process is in; None: no limit."""
    limit_used_bytes: int | None
    clock_synchronised: bool | None
    """As the kernel knows it; None where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    packages: dict[str, str]
    """Distribution to version; what is not installed is left out."""
    cuda: str | None
    hip: str | None
    nccl: str | None
    """RCCL's on AMD."""
    architectures: list[str]
    """GPU architectures that this build of torch has code for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    index: int
    name: str
    architecture: str
    """sm_90, gfx90a."""
    in_build: bool
    """torch has code for it, or code that it can run."""
    total_bytes: int
    free_bytes: int
    """Before anything of ours was there."""
    product_error: float | None
    """Largest difference of a matrix product to the CPU's, over the largest entry; None where it raised."""
    problem: str
    """What it raised; empty where it worked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """What the driver's tool says of a device."""

    index: int
    driver: str
    clock_mhz: float | None
    most_clock_mhz: float | None
    temperature_c: float | None
    power_limit_w: float | None
    throttled: str
    """Why the clock is held back, other than idleness and the power limit itself; empty where it is not."""
    uncorrected_errors: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One kernel, forward and backward on packed documents, against the written-out computation in float32."""

    kernel: str
    chosen: bool
    """The trainer would take this one here."""
    device: str
    query_heads: int
    key_heads: int
    qk_dim: int
    v_dim: int
    tokens: int
    output_error: float | None
    """Largest difference over the largest entry; None where it raised or gave no finite number."""
    gradient_error: float | None
    """The same of the gradients of queries, keys and values; the worst of the three."""
    plain_error: float
    """What the written-out computation itself is off in 16 bits: the measure for the others."""
    problem: str
    """What it raised, or what is not finite; empty where it worked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """Attention of one rank's share of a document, forward and backward, timed and as the fit has it."""

    tokens: int
    """Of the document."""
    ranks: int
    """That hold equal, mirrored shares of it."""
    seconds: float
    fitted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What computation and exchange cost here: the coefficients of the cost model that schedules are made by."""

    device: str
    dtype: str
    linear_flops_per_s: Annotated[float, Field(gt=0)]
    """Of dense products in training; FLOP/s reached, as all rates here."""
    expert_flops_per_s: Annotated[float, Field(gt=0)] | None
    """Of grouped products of experts; None for a dense model."""
    attention_flops_per_s: Annotated[float, Field(gt=0)]
    """Forward and backward together, at long documents."""
    tile_tokens: Annotated[int, Field(ge=0)]
    """Rows of an attention tile, as the fit sees them."""
    slot_s: Annotated[float, Field(gt=0)] | None
    """Of a micro-batch of one token through all layers; None without a model."""
    ranks: int
    """Processes that exchanged; 1: none, as there is one device."""
    bytes_per_s: Annotated[float, Field(gt=0)] | None
    """That a rank receives in an all-to-all over them."""
    hop_s: Annotated[float, Field(ge=0)] | None
    """Latency of an all-to-all for each further rank in it."""
    points: list[CostPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    asked: str
    """Value of the variable that asks for expandable segments; empty: none does."""
    variable: str
    expandable: bool
    """Segments in the allocator's own snapshot are expandable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBit:
    device: str
    error: float
    """Root mean square of the round trip's error over that of normal weights; NF4 with blocks of 64: 0.09."""
    product_error: float
    """A product with the dequantised matrix against the same in float32, relative root mean square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    backend: str
    ranks: int
    first_s: float
    """Seconds of the first all-reduce of the first group, with its set-up."""
    second_s: float
    """The same of a second group of the same ranks."""
    bytes_per_s: float
    """Of a large all-reduce, as its payload over its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    path: str
    kind: str
    """File system: ext4, lustre, nfs4."""
    free_bytes: int
    free_inodes: int | None
    """None where the file system does not count them."""
    written_bytes: int
    write_bytes_per_s: Annotated[float, Field(gt=0)]
    """Written and synced."""
    sync_s: float
    """Of a file of 4 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shm:
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    variable: str
    path: str
    given: bool
    """The variable is set; else this is where the tool goes by itself."""
    kind: str
    shared: bool
    """The file system is one that all nodes see."""
    in_home: bool
    writable: bool
    free_bytes: int
    free_inodes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    version: int = PROBE_VERSION
    time: str
    """UTC, ISO 8601."""
    host: str
    outcomes: list[Outcome]
    machine: Machine | None = None
    versions: Versions | None = None
    devices: list[Device] | None = None
    states: list[DeviceState] | None = None
    attention: list[AttentionKernel] | None = None
    costs: Costs | None = None
    allocator: Allocator | None = None
    four_bit: FourBit | None = None
    groups: Groups | None = None
    disk: Disk | None = None
    shm: Shm | None = None
    caches: list[Cache] | None = None

    def outcome(self, name: str) -> Outcome | None:
        return next((item for item in self.outcomes if item.name == name), None)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"


def read_probe(path: Path) -> Probe:
    """A probe.json. Raises UserError for a file that is none, or of another version."""
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise UserError(f"{path} holds {path.stat().st_size:,} bytes; a probe.json has at most {LIMIT_BYTES:,}.")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; `gatewright probe` writes it") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON, or is cut off; `gatewright probe` writes it anew") from None
    if not isinstance(values, dict) or values.get("version") != PROBE_VERSION:
        got = values.get("version") if isinstance(values, dict) else type(values).__name__
        raise UserError(f"{path}: version {str(got)[:20]}, wanted {PROBE_VERSION}; probe the machine again")
    return record(Probe, values, what=str(path))


def record(kind: type[T], values: Any, *, what: str) -> T:
    """Plain values as a record of this module. Raises UserError that names the first field that is wrong."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{what}: {where}: {first['msg']}; probe the machine again") from None
