"""Lengths of the packed documents on their way through a model: by keyword, and past modules that drop keywords."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "document_lengths")
"""Keywords that tell a forward where documents end; train/forward.py writes them."""

_within: ContextVar[Sequence[int] | None] = ContextVar("document_lengths", default=None)


def lengths_of(kwargs: Mapping[str, Any]) -> Sequence[int] | None:
    """Lengths of the documents a forward runs on, by its keywords or else by those of the decoder block around it.

    None where nothing is packed, as in decoding.
    """
    if kwargs.get("document_lengths") is not None:
        return kwargs["document_lengths"]
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"].diff().tolist()
    return _within.get()


def spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each document in the row."""
    return pairwise((0, *accumulate(lengths)))


@contextmanager
def within(lengths: Sequence[int] | None) -> Iterator[None]:
    """Has `lengths_of` say these to all that runs inside the block without keywords of its own."""
    token = _within.set(lengths)
    try:
        yield
    finally:
        _within.reset(token)


def tell_inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A decoder block's own forward, within which parts without keywords may ask `lengths_of`, recomputed or not."""
    with within(lengths_of(kwargs)):
        return type(self).forward(self, *args, **kwargs)
