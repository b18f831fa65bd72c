"""The sections of `gatewright data inspect` that lengths alone can fill, and its page for a file of lengths."""

import re
from collections.abc import Iterator, Mapping

from gatewright.packing.arrays import IntArray
from gatewright.packing.gain import limit_gain, packing_gain
from gatewright.packing.lengths import histogram, padded_fill, percentile
from gatewright.packing.pack import pack, sum_bound
from gatewright.spec.errors import DataError

WIDTH = 100
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
LIMITS = ("p99", "p95", "p90")
SPEED_BATCH = 4
"""Documents of a padded batch that limits are compared in."""
DEFAULT_CAPACITY_TOKENS = 4096


def lengths_page(
    lengths_N: IntArray,
    *,
    source: str,
    empty: int = 0,
    max_tokens: int | str | None = None,
    capacity: int | None = None,
    knee_tokens: int | None = None,
) -> str:
    """The page for documents of which only the lengths are known. Raises DataError for a limit that is none."""
    room = default_capacity(lengths_N, capacity)
    limits = named_limits(lengths_N, max_tokens)
    lines = [source, "", f"{'documents':<16}{len(lengths_N):>16,}", f"{'tokens':<16}{int(lengths_N.sum()):>16,}"]
    if empty:
        lines.append(f"{'left out':<16}{empty:>16,}   of no tokens")
    sections = {
        **length_sections(lengths_N, room, knee_tokens),
        "Cost of a limit on the length (data.max_tokens), by policy (data.overlong)": losses(lengths_N, limits),
        "Speed-up of a limit, by truncating to it": speed_ups(lengths_N, limits, knee_tokens),
    }
    for title, section in sections.items():
        lines += ["", title, *(f"  {line}" for line in section)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def default_capacity(lengths_N: IntArray, capacity: int | None) -> int:
    """The capacity that was asked for; else the longest document, or 4,096 if that is more."""
    return capacity or max(int(lengths_N.max()), DEFAULT_CAPACITY_TOKENS)


def named_limits(lengths_N: IntArray, wanted: int | str | None) -> dict[str, int]:
    """Limits by the name they are shown under: the one asked for, p99, p95, p90. Raises DataError for no limit."""
    named: dict[str, int] = {}
    if isinstance(wanted, int):
        if wanted < 1:
            raise DataError(f"max_tokens is {wanted}; wanted at least 1, or a percentile such as p99")
        named[f"{wanted:,}"] = wanted
    for name in dict.fromkeys([*([wanted] if isinstance(wanted, str) else []), *LIMITS]):
        percent = re.fullmatch(r"p(\d+(?:\.\d+)?)", name)
        if not percent or float(percent[1]) > 100:
            raise DataError(f"max_tokens is {name!r}; wanted a number of tokens, or a percentile such as p99")
        tokens = percentile(lengths_N, float(percent[1]))
        named[f"{name} = {tokens:,}"] = tokens
    return named


def length_sections(lengths_N: IntArray, capacity: int, knee: int | None) -> dict[str, Iterator[str]]:
    """Titles and lines of what is said before any limit."""
    return {
        "Length of the documents in tokens, how many there are, and their share of all tokens": lengths(lengths_N),
        "Padding, if batches in random order were padded to their longest document": padding(lengths_N, knee),
        f"Packing into micro-batches of {capacity:,} tokens": packing(lengths_N, capacity),
    }


def lengths(lengths_N: IntArray) -> Iterator[str]:
    names = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    yield "     ".join(f"{name} {percentile(lengths_N, percent):,}" for name, percent in names.items())
    yield ""
    widest = max(len(line) for line in histogram(lengths_N, width=1))
    yield from (line.rstrip() for line in histogram(lengths_N, width=WIDTH - 2 - widest + 1))


def padding(lengths_N: IntArray, knee: int | None) -> Iterator[str]:
    waste = [1 - padded_fill(lengths_N, batch_size=size) for size in BATCH_SIZES]
    yield f"{'documents a batch':<18}" + "".join(f"{size:>9}" for size in BATCH_SIZES)
    yield f"{'padding':<18}" + "".join(f"{share:>9.1%}" for share in waste)
    gains = [packing_gain(lengths_N, batch_size=size, knee_tokens=knee) for size in BATCH_SIZES]
    yield f"{'packing instead':<18}" + "".join(f"{gain:>8.2f}×" for gain in gains)
    yield pricing(knee)


def packing(lengths_N: IntArray, capacity: int) -> Iterator[str]:
    longest = int(lengths_N.max())
    if longest > capacity:
        yield f"impossible: the longest document has {longest:,} tokens"
        return
    packs = pack(lengths_N, capacity)
    by_sum, by_size = sum_bound(lengths_N, capacity), packs.lower_bound
    above = len(packs) - by_size
    verdict = "this is the best there is" if not above else f"{above:,} above that ({above / by_size:.2%})"
    yield f"{len(packs):,} packs, {packs.fill:.2%} full, {len(lengths_N) / len(packs):.1f} documents in each"
    yield f"at least {by_sum:,} are needed for the sum of tokens, {by_size:,} for what fits together: {verdict}"


def losses(lengths_N: IntArray, limits: Mapping[str, int]) -> Iterator[str]:
    """What each policy loses. A split loses no tokens but, at each cut, a target that nothing predicts any more."""
    yield f"{'limit':<18}{'longer documents':>18}{'truncate loses':>20}{'split: cuts':>20}{'drop loses':>20}"
    tokens = int(lengths_N.sum())
    for name, limit in limits.items():
        over = lengths_N[lengths_N > limit]
        cuts = int((-(-over // limit) - 1).sum())
        yield (
            f"{name:<18}{len(over):>18,}{lost(int((over - limit).sum()), tokens):>20}{cuts:>20,}"
            f"{lost(int(over.sum()), tokens):>20}"
        )


def speed_ups(lengths_N: IntArray, limits: Mapping[str, int], knee: int | None) -> Iterator[str]:
    """How much faster an epoch gets: in batches that are padded, in packs, and what halving is believed to give."""
    longest = int(lengths_N.max())
    named = dict(limits)
    if longest > 1:
        named[f"half the longest = {longest // 2:,}"] = longest // 2
    padded = f"padded by {SPEED_BATCH}"
    yield f"{'limit':<26}{'if all were longest':>20}{padded:>16}{'packed':>12}{'truncating loses':>22}"
    for name, limit in named.items():
        gain = limit_gain(lengths_N, limit, batch_size=SPEED_BATCH, knee_tokens=knee)
        loss = lost(gain.tokens_lost, int(lengths_N.sum()))
        yield f"{name:<26}{gain.hoped:>19.2f}×{gain.padded:>15.2f}×{gain.packed:>11.2f}×{loss:>22}"


def pricing(knee: int | None) -> str:
    if knee is None:
        return "speed-ups count tokens only: no model was given whose attention can be priced"
    return f"speed-ups count arithmetic: attention costs as much as all the rest at documents of {knee:,} tokens"


def lost(count: int, tokens: int) -> str:
    return f"{count:,} ({count / tokens:.1%})"
