"""The page of `gatewright data inspect`: how long documents are, what padding wastes, what packing and limits cost."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from gatewright.data.store import TokenStore, build_store
from gatewright.data.template import Renderer
from gatewright.data.tokenizer import load_tokenizer
from gatewright.data.view import DocumentView
from gatewright.packing.gain import limit_gain, packing_gain
from gatewright.packing.lengths import histogram, padded_fill, percentile
from gatewright.packing.pack import martello_toth_bound, pack, sum_bound

WIDTH = 100
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
LIMITS = ("p99", "p95", "p90")
SPEED_BATCH = 4
"""Documents of a padded batch that limits are compared in."""
DEFAULT_CAPACITY_TOKENS = 4096
SHOWN_TOKENS = 1000
"""Tokens of the first document that are printed."""


def inspect_data(
    file: Path,
    *,
    model: str,
    max_tokens: int | str | None = None,
    capacity: int | None = None,
    knee_tokens: int | None = None,
    console: Console,
    root: Path = Path("runs/.tokens"),
) -> None:
    """Prints the page. The tokens stay below `root`, where a training run finds them again.

    max_tokens: a limit to look at besides p99, p95 and p90. capacity: tokens a micro-batch holds; by default the
    longest document, or 4,096 if that is more. knee_tokens: length at which the model's attention costs as much as all
    the rest, for the speed-ups; None leaves attention out of them.

    Raises DataError or ModelError for data, or a model folder, that cannot be used.
    """
    tokenizer = load_tokenizer(Path(model))
    vocab_size = _vocab_size(Path(model), tokenizer)
    store = build_store(file, renderer=Renderer(tokenizer), root=root, vocab_size=vocab_size, console=console)
    whole = store.limit("p100", "truncate")
    capacity = capacity or max(int(whole.lengths.max()), DEFAULT_CAPACITY_TOKENS)
    sections = {
        "": _totals(store, whole, model),
        "Length of the documents in tokens, how many there are, and their share of all tokens": _lengths(whole),
        "Padding, if batches in random order were padded to their longest document": _padding(whole, knee_tokens),
        f"Packing into micro-batches of {capacity:,} tokens": _packing(whole, capacity),
        "Cost of a limit on the length (data.max_tokens), by policy (data.overlong)": _limits(store, whole, max_tokens),
        "Speed-up of a limit, by truncating to it": _speed_ups(store, whole, max_tokens, knee_tokens),
    }
    for title, lines in sections.items():
        if title:
            console.print(f"\n{title}", style="bold", highlight=False, markup=False)
        for line in lines:
            console.print(f"  {line}" if title else line, highlight=False, markup=False, soft_wrap=True)
    _print_document(whole, tokenizer, store, console)


def _totals(store: TokenStore, view: DocumentView, model: str) -> Iterator[str]:
    tokens = int(view.lengths.sum())
    rows = [
        ("documents", len(view), ""),
        ("tokens", tokens, ""),
        ("trained tokens", view.target_tokens, f"{view.target_tokens / tokens:.1%}"),
        ("left out", view.untrained_documents, "rows that hold nothing to learn"),
        ("left out", store.straddling_tokens, "tokens that hold the end of a prompt and the start of an answer"),
        ("left out", store.dropped_reasoning, "turns' reasoning, which the chat template does not write"),
    ]
    yield store.source
    yield f"in tokens of {model}"
    yield ""
    for name, count, meaning in rows:
        if count or name != "left out":
            yield f"{name:<16}{count:>16,}   {meaning}".rstrip()


def _lengths(view: DocumentView) -> Iterator[str]:
    names = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    yield "     ".join(f"{name} {percentile(view.lengths, percent):,}" for name, percent in names.items())
    yield ""
    widest = max(len(line) for line in histogram(view.lengths, width=1))
    yield from (line.rstrip() for line in histogram(view.lengths, width=WIDTH - 2 - widest + 1))


def _padding(view: DocumentView, knee: int | None) -> Iterator[str]:
    waste = [1 - padded_fill(view.lengths, batch_size=size) for size in BATCH_SIZES]
    yield f"{'documents a batch':<18}" + "".join(f"{size:>9}" for size in BATCH_SIZES)
    yield f"{'padding':<18}" + "".join(f"{share:>9.1%}" for share in waste)
    gains = [packing_gain(view.lengths, batch_size=size, knee_tokens=knee) for size in BATCH_SIZES]
    yield f"{'packing instead':<18}" + "".join(f"{gain:>8.2f}×" for gain in gains)
    yield _pricing(knee)


def _packing(view: DocumentView, capacity: int) -> Iterator[str]:
    longest = int(view.lengths.max())
    if longest > capacity:
        yield f"impossible: the longest document has {longest:,} tokens"
        return
    packs = pack(view.lengths, capacity)
    by_sum, by_size = sum_bound(view.lengths, capacity), martello_toth_bound(view.lengths, capacity)
    above = len(packs) - packs.lower_bound
    verdict = "this is the best there is" if not above else f"{above:,} above that ({above / packs.lower_bound:.2%})"
    yield f"{len(packs):,} packs, {packs.fill:.2%} full, {len(view) / len(packs):.1f} documents in each"
    yield f"at least {by_sum:,} are needed for the sum of tokens, {by_size:,} for what fits together: {verdict}"


def _limits(store: TokenStore, whole: DocumentView, wanted: int | str | None) -> Iterator[str]:
    tokens = int(whole.lengths.sum())
    yield f"{'limit':<18}{'longer documents':>18}{'truncate loses':>20}{'split: targets cut':>20}{'drop loses':>20}"
    for limit in dict.fromkeys([*([wanted] if wanted is not None else []), *LIMITS]):
        truncated, split, dropped = (store.limit(limit, policy) for policy in ("truncate", "split", "drop"))
        name = f"{limit} = {truncated.max_tokens:,}" if isinstance(limit, str) else f"{limit:,}"
        yield (
            f"{name:<18}{truncated.overlong_documents:>18,}{_lost(truncated.tokens_lost, tokens):>20}"
            f"{split.tokens_lost:>20,}{_lost(dropped.tokens_lost, tokens):>20}"
        )


def _speed_ups(store: TokenStore, whole: DocumentView, wanted: int | str | None, knee: int | None) -> Iterator[str]:
    """How much faster an epoch gets: in batches that are padded, in packs, and what halving is believed to give."""
    longest = int(whole.lengths.max())
    named = {f"{limit}": store.limit(limit, "truncate").max_tokens for limit in ([wanted] if wanted else [])}
    named |= {limit: percentile(whole.lengths, float(limit[1:])) for limit in LIMITS}
    if longest > 1:
        named["half the longest"] = longest // 2
    padded = f"padded by {SPEED_BATCH}"
    yield f"{'limit':<26}{'if all were longest':>20}{padded:>16}{'packed':>12}{'truncating loses':>22}"
    for name, limit in named.items():
        gain = limit_gain(whole.lengths, limit, batch_size=SPEED_BATCH, knee_tokens=knee)
        title = f"{limit:,}" if name.isdecimal() else f"{name} = {limit:,}"
        lost = _lost(gain.tokens_lost, int(whole.lengths.sum()))
        yield f"{title:<26}{gain.hoped:>19.2f}×{gain.padded:>15.2f}×{gain.packed:>11.2f}×{lost:>22}"


def _pricing(knee: int | None) -> str:
    if knee is None:
        return "speed-ups count tokens only: the model's config is not one whose attention can be priced"
    return f"speed-ups count arithmetic: attention costs as much as all the rest at documents of {knee:,} tokens"


def _lost(lost: int, tokens: int) -> str:
    return f"{lost:,} ({lost / tokens:.1%})"


def _print_document(
    view: DocumentView, tokenizer: PreTrainedTokenizerFast, store: TokenStore, console: Console
) -> None:
    """The first document as the model sees it, with the trained tokens set off by colour, or by ⟦ ⟧ without colour."""
    tokens, is_target = view.document(0)
    shown_targets = is_target[:SHOWN_TOKENS].copy()
    shown_targets[0] = False  # Nothing stands before it.
    colours = console.color_system is not None and not console.no_color
    manner = "in green" if colours else "between ⟦ and ⟧"
    place = store.place(int(view.rows_N[0]))
    title = f"\nThe first document ({place}), its trained tokens {manner}"
    console.print(title, style="bold", highlight=False, markup=False)
    page = Text()
    for trained, run in groupby(
        zip(tokens[:SHOWN_TOKENS].tolist(), shown_targets.tolist(), strict=True), lambda t: t[1]
    ):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        page.append(f"⟦{text}⟧" if trained and not colours else text, style="green" if trained else "dim")
    console.print(page, width=min(console.width, WIDTH))
    if len(tokens) > SHOWN_TOKENS:
        console.print(f"… and {len(tokens) - SHOWN_TOKENS:,} tokens more", style="dim", highlight=False)


def _vocab_size(folder: Path, tokenizer: PreTrainedTokenizerFast) -> int:
    """The model's, by its config.json; the tokenizer's where the folder has none."""
    file = folder / "config.json"
    if not file.exists():
        return len(tokenizer)
    config = json.loads(file.read_bytes())
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", len(tokenizer)))
    assert isinstance(size, int)
    return size
