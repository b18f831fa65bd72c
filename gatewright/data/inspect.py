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
from gatewright.packing.arrays import IntArray
from gatewright.packing.lengths_page import (
    LIMITS,
    WIDTH,
    default_capacity,
    length_sections,
    lost,
    named_limits,
    speed_ups,
)

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
    store = _store(file, model, tokenizer, root=root, console=console)
    whole = store.limit("p100", "truncate")
    sections = {
        "": _totals(store, whole, model),
        **length_sections(whole.lengths, default_capacity(whole.lengths, capacity), knee_tokens),
        "Cost of a limit on the length (data.max_tokens), by policy (data.overlong)": _limits(store, whole, max_tokens),
        "Speed-up of a limit, by truncating to it": speed_ups(
            whole.lengths, named_limits(whole.lengths, max_tokens), knee_tokens
        ),
    }
    for title, lines in sections.items():
        if title:
            console.print(f"\n{title}", style="bold", highlight=False, markup=False)
        for line in lines:
            console.print(f"  {line}" if title else line, highlight=False, markup=False, soft_wrap=True)
    _print_document(whole, tokenizer, store, console)


def document_lengths(file: Path, *, model: str, root: Path = Path("runs/.tokens")) -> IntArray:
    """[documents] tokens of each document that holds something to learn, in the model's tokens.

    Raises DataError or ModelError for data, or a model folder, that cannot be used.
    """
    store = _store(file, model, load_tokenizer(Path(model)), root=root, console=Console(stderr=True))
    return store.limit("p100", "truncate").lengths


def _store(file: Path, model: str, tokenizer: PreTrainedTokenizerFast, *, root: Path, console: Console) -> TokenStore:
    vocab_size = _vocab_size(Path(model), tokenizer)
    return build_store(file, renderer=Renderer(tokenizer), root=root, vocab_size=vocab_size, console=console)


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


def _limits(store: TokenStore, whole: DocumentView, wanted: int | str | None) -> Iterator[str]:
    tokens = int(whole.lengths.sum())
    yield f"{'limit':<18}{'longer documents':>18}{'truncate loses':>20}{'split: targets cut':>20}{'drop loses':>20}"
    for limit in dict.fromkeys([*([wanted] if wanted is not None else []), *LIMITS]):
        truncated, split, dropped = (store.limit(limit, policy) for policy in ("truncate", "split", "drop"))
        name = f"{limit} = {truncated.max_tokens:,}" if isinstance(limit, str) else f"{limit:,}"
        yield (
            f"{name:<18}{truncated.overlong_documents:>18,}{lost(truncated.tokens_lost, tokens):>20}"
            f"{split.tokens_lost:>20,}{lost(dropped.tokens_lost, tokens):>20}"
        )


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
