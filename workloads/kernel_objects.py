"""BPF programs, maps and links that a process holds, and which of them the kernel still has."""

import contextlib
import ctypes
import os
import re
import subprocess
from functools import cache
from pathlib import Path

BY_ID = {"prog_id": "bpf_prog_get_fd_by_id", "map_id": "bpf_map_get_fd_by_id", "link_id": "bpf_link_get_fd_by_id"}
Held = set[tuple[str, int]]
"""(kind, number) of each."""


@cache
def load_libbpf() -> ctypes.CDLL:
    """The library, which asks the kernel."""
    return ctypes.CDLL("libbpf.so.1", use_errno=True)


def held_in_kernel(pid: int) -> Held:
    """Those of which a process has a descriptor; empty for process 0."""
    held = set()
    for path in Path(f"/proc/{pid}/fdinfo").glob("*"):
        with contextlib.suppress(OSError):
            held |= {(kind, int(number)) for kind, number in re.findall(r"^(\w+_id):\s+(\d+)", path.read_text(), re.M)}
    return {(kind, number) for kind, number in held if kind in BY_ID}


def still_in_kernel(held: Held) -> Held:
    """Those that the kernel still has."""
    found = set()
    for kind, number in held:
        fd = getattr(load_libbpf(), BY_ID[kind])(number)
        if fd >= 0:
            os.close(fd)
            found.add((kind, number))
    return found


def recorder_of(tracer: subprocess.Popen[str]) -> int:
    """The process id of a tracer's recorder; 0 before it was started."""
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().startswith("moescope"):
                return int(pid)
    return 0
