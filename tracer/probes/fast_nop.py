"""Whether the kernel emulates a probed nop, detected by kernel features, not by measurement."""

import ctypes
import errno
import platform
from functools import cache
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
UPROBE_CALL = 336  # the x86-64 system call that replaces a probed long nop
SYMBOLS = Path("/proc/kallsyms")


@cache
def has_fast_nop() -> bool:
    """On x86-64 the 5-byte nop becomes a system call (Linux 6.18: ba2bfc97b462 "uprobes/x86: Add support to optimize uprobes").

    arm64 kernels that simulate the nop have a function simulate_nop.
    """
    if platform.machine() == "x86_64":
        return libc.syscall(ctypes.c_long(UPROBE_CALL)) < 0 and ctypes.get_errno() != errno.ENOSYS
    try:
        return b" simulate_nop\n" in SYMBOLS.read_bytes()
    except OSError:
        return False
