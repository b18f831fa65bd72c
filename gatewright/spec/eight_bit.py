"""How bitsandbytes keeps AdamW's moments in 8 bits (0.44 to 0.50), for who runs it and who plans it."""

SMALL_8BIT = 4096
"""Tensors of fewer elements keep their moments in float32."""
BLOCK_8BIT = 256
"""Elements of others that share a float32 scale."""
BYTES_8BIT = 2 * (1 + 4 / BLOCK_8BIT)
"""Of an element's two moments: a byte each, and its part of their scales."""
