"""FLOPs of training on documents, recomputation not counted: what a plan's time and a run's MFU are both made of.

Attention under the causal mask grows along a document, so what a slice [a, b) of one costs is F(b) − F(a), with F(s)
the FLOPs of a document of s tokens: however documents are cut and dealt out, their sum is the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gatewright.spec.shape import Attention

ATTENTION_PASSES = 3.5
"""Two products forward, five backward in a fused kernel, which recomputes the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Of one model and what trains of it."""

    products: float
    """Of a token in all matrices that it passes through, forward and backward."""
    mixers: tuple[tuple[int, Attention], ...]
    """How many layers have each kind of attention."""

    def of_slices(self, slices: Iterable[tuple[int, int]]) -> float:
        """Of slices of documents, each from its first token to the one behind its last."""
        return sum(self.of_document(end) - self.of_document(begin) for begin, end in slices)

    def of_document(self, tokens: int) -> float:
        """Forward and backward."""
        return tokens * (self.products + ATTENTION_PASSES * self.attention(tokens))

    def attention(self, length: int) -> float:
        """Forward FLOPs of attention for the mean token of a document of so many tokens."""
        return sum(layers * attention_flops(mixer, length) for layers, mixer in self.mixers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a run's speed is measured against."""

    flops: ModelFlops
    peak_flops_per_s: float
    """Of one rank's device, dense and in bf16, by its data sheet."""

    def mfu(self, flops: float, *, seconds: float, ranks: int) -> float:
        """Model FLOPs utilisation: the share of what the devices could have done in that time."""
        return flops / (seconds * ranks * self.peak_flops_per_s)


def attention_flops(attention: Attention, length: int) -> float:
    """Forward FLOPs of one token of a document of `length` tokens: half the square, within the window."""
    if attention.kind == "linear":
        return 6.0 * attention.heads * attention.qk_dim * attention.v_dim
    keys = length / 2
    if attention.window_tokens is not None:
        window = attention.window_tokens
        keys = min(keys, window if length > window else length / 2)
    if attention.index_top_k is not None:
        keys = min(keys, attention.index_top_k)
    if attention.compression > 1:
        keys = keys / attention.compression + (attention.window_tokens or 0)
    indexer = 2.0 * attention.index_heads * attention.index_dim * (length / 2 / attention.compression)
    return 2.0 * attention.heads * (attention.qk_dim + attention.v_dim) * keys + indexer
