"""The C library's heap on a CPU: what a step frees goes back to the system, so that a rank holds what it uses.

glibc keeps freed blocks of up to 32 MiB for its own. Under zero3 a block's gathered weights are such: they are freed
after the block, activations settle in the hole they leave, and the next block's weights no longer fit there. Other C
libraries are left as they are.
"""

import ctypes
import os

M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
LARGE_BYTES = 16 << 20
"""Of a block that gets pages of its own and gives them back; smaller ones cost more page faults than they save."""


def return_large_blocks() -> None:
    """From now on, in this process; not where the user set glibc's threshold in the environment."""
    if hasattr(_LIBC, "mallopt") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _LIBC.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def return_free_pages() -> None:
    """Once, now: of everything that was freed until here."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


_LIBC = ctypes.CDLL(None)
