"""What the C library does with the memory of arrays that were freed."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, LARGEST_BYTES = 256 << 20, 32 << 20
"""How much freed memory is kept, and the size from which an array is mapped on its own: the largest that glibc takes."""


def keep_freed_memory() -> None:
    """Have freed memory kept for the next arrays, from now on. Does nothing with a C library other than glibc.

    By default every large array is mapped afresh, and the kernel clears each of its pages: a quarter of the CPU time of making
    tables.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    adjust(M_TRIM_THRESHOLD, KEPT_BYTES)
    adjust(M_MMAP_THRESHOLD, LARGEST_BYTES)
