"""What the driver's own tool says of the GPUs: driver version, clocks, temperature, limits, errors."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict

from gatewright.probe.absent import Absent
from gatewright.probe.children import Wanted
from gatewright.spec.probe import DeviceState

NVIDIA_FIELDS = (
    "index",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "power.limit",
    "ecc.errors.uncorrected.volatile.total",
)
SLOWDOWNS = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
REASONS = ("hardware thermal slowdown", "power brake", "software thermal slowdown")
ROCM_OPTIONS = ("--showdriverversion", "--showclocks", "--showtemp", "--showmaxpower", "--json")


def measure_driver(wanted: Wanted) -> tuple[str, list[dict[str, object]]]:
    if tool := shutil.which("nvidia-smi"):
        states = read_nvidia(ask_nvidia(tool))
    elif tool := shutil.which("rocm-smi"):
        states = read_rocm(said(tool, *ROCM_OPTIONS))
    else:
        raise Absent("neither nvidia-smi nor rocm-smi is here")
    if not states:
        raise Absent(f"{tool} lists no device")
    held = [f"GPU {state.index}: {state.throttled}" for state in states if state.throttled]
    text = f"{len(states)} GPUs, driver {states[0].driver}"
    return text + (f"; clocks held back: {'; '.join(held)}" if held else ""), [asdict(state) for state in states]


def ask_nvidia(tool: str) -> str:
    """One line a GPU, with the slowdowns by the names that this driver knows. Raises OSError."""

    def ask(prefix: str) -> str:
        fields = (*NVIDIA_FIELDS, *(f"{prefix}.{name}" for name in SLOWDOWNS))
        return said(tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")

    try:
        return ask("clocks_event_reasons")
    except OSError as refused:
        if "not a valid field" not in str(refused):
            raise
        return ask("clocks_throttle_reasons")  # before driver 535


def said(tool: str, *options: str) -> str:
    """What the tool prints. Raises OSError with its own words where it fails."""
    ended = subprocess.run([tool, *options], capture_output=True, text=True, check=False)
    if ended.returncode:
        words = (ended.stderr or ended.stdout).strip().splitlines() or ["it said nothing"]
        raise OSError(f"{tool} ended with {ended.returncode}: {words[-1]}")
    return ended.stdout


def read_nvidia(text: str) -> list[DeviceState]:
    """Lines of `nvidia-smi --query-gpu`; what a GPU does not support is `[N/A]`."""
    states = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        reasons = [name for name, cell in zip(REASONS, cells[7:], strict=False) if cell == "Active"]
        errors = number(cells[6])
        states.append(
            DeviceState(
                index=int(cells[0]),
                driver=cells[1],
                clock_mhz=number(cells[2]),
                most_clock_mhz=number(cells[3]),
                temperature_c=number(cells[4]),
                power_limit_w=number(cells[5]),
                throttled=", ".join(reasons),
                uncorrected_errors=None if errors is None else int(errors),
            )
        )
    return states


def read_rocm(text: str) -> list[DeviceState]:
    """JSON of rocm-smi: one object a card; its keys are words for people, and differ between versions. A warning may
    stand before it (cards in a low-power state)."""
    cards = json.loads(text[max(0, text.find("{")) :])
    driver = str(cards.get("system", {}).get("Driver version", "unknown"))
    states = []
    for name, card in cards.items():
        if (found := re.fullmatch(r"card(\d+)", name)) is None:
            continue
        states.append(
            DeviceState(
                index=int(found[1]),
                driver=driver,
                clock_mhz=number(matching(card, r"sclk clock speed")),
                most_clock_mhz=None,
                temperature_c=number(matching(card, r"Temperature.*(junction|edge)")),
                power_limit_w=number(matching(card, r"Max.*Power")),
                throttled="",
                uncorrected_errors=None,
            )
        )
    return states


def matching(card: dict[str, str], pattern: str) -> str:
    return next((value for key, value in card.items() if re.search(pattern, key)), "")


def number(text: str) -> float | None:
    """The number in a cell: `(1700Mhz)` is 1700."""
    found = re.search(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else None
