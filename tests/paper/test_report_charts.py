"""Axes hold their values and end on round ticks; colours are symmetric around the fair share; units read well."""

import math
import random

import pytest

from gatewright.report import units
from gatewright.report.charts import linear_scale, log_scale, step_scale
from gatewright.report.heat import DEAD, SHADES, shade


@pytest.mark.parametrize("seed", range(50))
def test_a_scale_holds_its_values_and_its_ticks_are_round(seed: int) -> None:
    noise = random.Random(seed)
    size = 10 ** noise.uniform(-12, 12)
    values = [noise.gauss(noise.choice([0, 100]), 1) * size for _ in range(noise.choice([1, 2, 30]))]
    scale = linear_scale(values, zero=bool(seed % 2))
    assert all(-1e-6 <= scale.place(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(scale.ticks) <= 8
    step = scale.ticks[1] - scale.ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert round(mantissa, 6) in (1, 2, 5)


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [7.0, 7.0], [-3.0], [math.inf, 1.0]])
def test_a_scale_of_hardly_anything_still_has_an_extent(values: list[float]) -> None:
    for scale in (linear_scale(values, zero=False), linear_scale(values, zero=True), log_scale(values)):
        assert scale.high > scale.low
        assert all(math.isfinite(tick) for tick in scale.ticks)


def test_a_log_scale_has_whole_decades() -> None:
    scale = log_scale([0.3, 5.0, 900.0, 0.0, -1.0, math.nan])
    assert scale.ticks == pytest.approx((0.1, 1, 10, 100, 1000))
    assert scale.place(10) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("last", "ticks"), [(0, (0,)), (1, (0, 1)), (7, (0, 2, 4, 6)), (120, (0, 20, 40, 60, 80, 100, 120))]
)
def test_the_axis_of_steps_has_whole_ticks_up_to_the_last_step(last: int, ticks: tuple[int, ...]) -> None:
    assert step_scale(last).ticks == ticks


def test_colours_are_symmetric_in_octaves() -> None:
    assert shade(1.0) == "0"
    assert shade(0.0) == DEAD
    for load in (1.1, 1.5, 2.0, 3.7, 9.0):
        assert int(shade(load)) == -int(shade(1 / load))
    assert shade(100.0) == str(SHADES)


DURATIONS = {
    0.0: "0 ms",
    0.25: "250 ms",
    12.34: "12.3 s",
    59.97: "1 min 0 s",
    372: "6 min 12 s",
    11_520: "3 h 12 min",
    200_000: "2 d 7 h",
    math.nan: "–",
}
DECIMALS = {
    0.0: "0",
    2.31456: "2.315",
    0.00012345: "1.23e-4",
    123456.7: "123,457",
    0.8362: "0.8362",
    -2.5: "-2.500",
    9.9996: "10.00",
    2.5e12: "2.50e12",
    math.nan: "NaN",
    -math.inf: "−∞",
}
SHARES = {0: "0.0 %", 0.0004: "0.0 %", 0.977: "97.7 %", 0.9999: "> 99.9 %", 1: "100 %"}
SIZES = {0: "0 B", 900: "900 B", 1536: "1.50 KiB", 5 * 2**30: "5.00 GiB"}
COUNTS = {999: "999", 12_345: "12.3 k", 134_515_008: "134.5 M", 35e9: "35.0 B"}


def test_numbers_read_well() -> None:
    assert {seconds: units.duration(seconds) for seconds in DURATIONS} == DURATIONS
    assert {number: units.decimal(number) for number in DECIMALS} == DECIMALS
    assert {part: units.share(part) for part in SHARES} == SHARES
    assert {size: units.memory(size) for size in SIZES} == SIZES
    assert {number: units.rounded_count(number) for number in COUNTS} == COUNTS
    assert units.shorten("a\n  b", 20) == "a b"
    assert units.shorten("x" * 40 + "yz", 20) == "xxxxx … xxxxxxxxxxyz"
    assert (units.plural(1, "step"), units.plural(2000, "step")) == ("1 step", "2,000 steps")
