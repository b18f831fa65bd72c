"""Numbers as people read them: with units, thousands separators and no more digits than they carry."""

import math
from datetime import UTC, datetime

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def count(number: float) -> str:
    """A whole number with thousands separators."""
    return f"{number:,.0f}"


def rounded_count(number: float) -> str:
    """A large number in thousands, millions or billions: `134.5 M`."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f} {unit}"
    return count(number)


def decimal(number: float, *, digits: int = 4) -> str:
    """`digits` significant digits; a power of ten only where zeros would hide the number."""
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else ("−∞" if number < 0 else "∞")
    if number == 0:
        return "0"
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])  # after rounding: 9.9996 has the digits of 10.00
    if exponent < -3 or exponent >= 9:
        mantissa, power = f"{number:.{max(0, min(digits, 3) - 1)}e}".split("e")
        return f"{mantissa}e{int(power)}"
    return f"{number:,.{max(0, digits - 1 - exponent)}f}"


def share(fraction: float) -> str:
    """A fraction of one in percent; `100 %` only when nothing is missing."""
    if not math.isfinite(fraction):
        return "–"
    percent = 100 * fraction
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    return "100 %" if percent == 100 else f"{percent:.1f} %"


def binary_unit(size_bytes: float) -> tuple[int, str]:
    """Bytes in the largest binary unit that keeps a digit before the point, and its name."""
    power = 0 if size_bytes < 1 else min(int(math.log2(size_bytes) // 10), len(_BYTE_UNITS) - 1)
    return 1024**power, _BYTE_UNITS[power]


def memory(size_bytes: float) -> str:
    """Bytes in a binary unit: `1.24 GiB`."""
    if not math.isfinite(size_bytes):
        return "–"
    size, unit = binary_unit(size_bytes)
    return f"{size_bytes:,.0f} B" if size == 1 else f"{size_bytes / size:,.2f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: `6 min 12 s`."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(time: datetime) -> str:
    """A point in time, to the minute, in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def plural(number: int, noun: str) -> str:
    """The number and the noun, with an s unless it is one."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def shorten(text: str, length: int) -> str:
    """The text on one line, cut in its middle to `length` characters with an ellipsis."""
    line = " ".join(text.split())
    head = length // 4
    return line if len(line) <= length else f"{line[:head]} … {line[len(line) - (length - head - 3) :]}"
