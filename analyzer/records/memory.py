"""How the C library treats the memory of freed arrays."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, LARGEST_BYTES = 256 << 20, 32 << 20
"""How much freed memory is kept, and the size from which an array is mapped on its own: the largest that glibc takes."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for later arrays. Has no effect with C libraries other than glibc.

    By default every large array gets a new mapping whose pages the kernel clears: a quarter of the CPU time of making
    tables.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    adjust(M_TRIM_THRESHOLD, KEPT_BYTES)
    adjust(M_MMAP_THRESHOLD, LARGEST_BYTES)
