"""The process that a user names."""

import os
from pathlib import Path

from tracer.errors import TargetError

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of a task's flags."""


def command_line(pid: int) -> list[str]:
    """The words of a process's command line; raises TargetError if there is no program to follow."""
    if pid == os.getpid():
        raise TargetError(f"{pid} is the tracer itself; give another process")
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        raise TargetError(f"there is no process {pid}; it may have ended") from None
    if status[0] in "ZX":
        raise TargetError(f"process {pid} has ended and waits for its parent, process {status[1]}, to collect its status")
    if int(status[6]) & KERNEL_THREAD:
        raise TargetError(f"{pid} is a kernel thread, which has no program to probe")
    return [word.decode(errors="replace") for word in words.split(b"\0") if word]
