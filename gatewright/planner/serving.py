"""Memory that a GGUF file takes in llama.cpp: weights, what each layer keeps of the context, and work space.

Follows llama.cpp as of llama-cpp-python 0.3.36, and its own log in tests/metal/test_export_fit.py.
"""

from dataclasses import dataclass

from gatewright.spec.shape import Attention, ModelShape

UBATCH_TOKENS = 512
"""Tokens that llama.cpp works on at one time by default (n_ubatch)."""
CACHE_BYTES = 2
"""Of a cached number: f16."""
STATE_BYTES = 4
"""Of a number of a recurrent state: f32."""
WORK_BYTES = 4
WIDE_BUFFERS = 4
"""Activations of one layer that lie there at one time, each as wide as its widest."""
CELLS = 256
"""The cache is a multiple of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes for one sequence."""

    weights_bytes: int
    cache_bytes: int
    """Keys and values of the context, and recurrent states."""
    work_bytes: int

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.work_bytes


def serving_memory(shape: ModelShape, *, weights_bytes: int, context_tokens: int) -> ServingMemory:
    """What a file of `weights_bytes` needs at that context, without flash attention and with the cache in 16 bits.

    Layers with a sliding window keep the whole context, as llama-cpp-python has them; llama-server keeps less.
    """
    tokens = -(-context_tokens // CELLS) * CELLS
    mixers = [layer.attention for layer in shape.layers if layer.attention is not None]
    return ServingMemory(
        weights_bytes=weights_bytes,
        cache_bytes=sum(_cached_bytes(mixer, tokens) for mixer in mixers),
        work_bytes=_work_bytes(shape, mixers, min(UBATCH_TOKENS, tokens), tokens),
    )


def _cached_bytes(mixer: Attention, tokens: int) -> int:
    if mixer.kind == "linear":
        channels = mixer.heads * mixer.v_dim + 2 * mixer.kv_heads * mixer.qk_dim
        taps = max(mixer.conv_kernel - 1, 0)
        return STATE_BYTES * (mixer.state_elements + taps * channels)
    keys = mixer.cache_elements_per_token * (tokens // mixer.compression)
    return CACHE_BYTES * (keys + mixer.index_dim * tokens)


def _work_bytes(shape: ModelShape, mixers: list[Attention], batch: int, tokens: int) -> int:
    """The larger of two moments: attention scores under their masks, and the logits of a whole batch."""
    attending = [mixer for mixer in mixers if mixer.kind != "linear"]
    masks = len({mixer.window_tokens for mixer in attending})
    scores = max((mixer.heads for mixer in attending), default=0) * tokens + masks * tokens
    inner = [layer.mlp.width * max(layer.mlp.top_k, 1) for layer in shape.layers if layer.mlp is not None]
    wide = max(shape.hidden, *inner, *(mixer.heads * mixer.qk_dim for mixer in mixers))
    return WORK_BYTES * batch * max(shape.vocab + shape.hidden, scores + WIDE_BUFFERS * wide)
