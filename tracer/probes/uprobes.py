"""Uprobes: run a program at an instruction of a file, in every process that maps it; closing the descriptor detaches."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tracer.errors import ProbeError, RequirementError
from tracer.probes.denials import why_denied
from tracer.probes.perf_events import ATTR_BYTES, connect, libc, opened

PROG_LOAD, LINK_CREATE = 5, 28
KPROBE_PROGRAM = 2  # the program type for probes
PERF_EVENT, UPROBE_MULTI = 41, 48  # attach types
AT_RETURN = 1
SYSCALL = {"x86_64": 321, "aarch64": 280}
RETURN_0 = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
EXPECTED_ATTACH_TYPE_AT = 68  # offset in the attributes of PROG_LOAD
UPROBE = Path("/sys/bus/event_source/devices/uprobe")
CLOSERS = 32


def bpf(command: int, attributes: bytes) -> int:
    """The bpf(2) system call; returns a descriptor or raises OSError."""
    number, size = ctypes.c_long(SYSCALL[platform.machine()]), ctypes.c_uint(len(attributes))
    result = libc.syscall(number, ctypes.c_int(command), attributes, size)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def multi_link(program_fd: int, path: str, offset: int, at_return: bool, cookie: int) -> int:
    """Attach by a uprobe_multi link; returns its descriptor; raises OSError."""
    text = ctypes.create_string_buffer(path.encode())
    place, mark = ctypes.c_uint64(offset), ctypes.c_uint64(cookie)
    where = (ctypes.addressof(text), ctypes.addressof(place), 0, ctypes.addressof(mark))
    kind = AT_RETURN if at_return else 0
    return bpf(LINK_CREATE, struct.pack("<IIIIQQQQIIII", program_fd, 0, UPROBE_MULTI, 0, *where, 1, kind, 0, 0))


def load_program(instructions: bytes, attach_type: int = 0) -> int:
    """Load a probe program from its instructions; returns its descriptor; raises OSError."""
    code, licence = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(b"GPL")
    head = struct.pack("<IIQQ", KPROBE_PROGRAM, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(licence))
    return bpf(PROG_LOAD, head.ljust(EXPECTED_ATTACH_TYPE_AT, b"\0") + struct.pack("<I", attach_type))


@cache
def has_multi_links() -> bool:
    """Whether this kernel attaches uprobes without perf events: such probes are removed in a fraction of the time.

    Linux 6.6: 89ae89f53d20 "bpf: Add multi uprobe link". It requires programs that were loaded with UPROBE_MULTI as the
    expected attach type.
    """
    try:
        program = load_program(RETURN_0, UPROBE_MULTI)
    except OSError:
        return False
    try:
        multi_link(program, "/", 0, False, 0)
    except OSError as error:
        return error.errno == errno.EBADF  # it checked the file, which is a directory; other kernels fail earlier
    finally:
        os.close(program)
    return False


def has_uprobes() -> bool:
    """Whether this kernel has uprobes at all, which CONFIG_UPROBE_EVENTS enables."""
    return UPROBE.exists() or has_multi_links()


def perf_event(path: str, offset: int, at_return: bool) -> int:
    """Open a perf event at the place, without a program yet."""
    try:
        kind = int((UPROBE / "type").read_text())
        bit = int((UPROBE / "format" / "retprobe").read_text().split(":")[1])
    except OSError:
        raise RequirementError("this kernel has no uprobes (CONFIG_UPROBE_EVENTS)") from None
    text = ctypes.create_string_buffer(path.encode())
    config = 1 << bit if at_return else 0
    # struct perf_event_attr: type, size, config, period, sample_type, read_format, flags, wakeup, bp_type, config1, config2
    head = struct.pack("<IIQQQQQIIQQ", kind, ATTR_BYTES, config, 0, 0, 0, 0, 0, 0, ctypes.addressof(text), offset)
    return opened(head.ljust(ATTR_BYTES, b"\0"), f"{path}+{offset:#x}")


def perf_link(program_fd: int, event: int, cookie: int) -> int:
    """Attach a program to an event by a link that carries a cookie (Linux 5.15); raises OSError."""
    try:
        return bpf(LINK_CREATE, struct.pack("<IIIIQ", program_fd, event, PERF_EVENT, 0, cookie))
    finally:
        os.close(event)


def attach_uprobe(program_fd: int, path: str, offset: int, at_return: bool, cookie: int = 0) -> int:
    """Probe offset `offset` of the file `path` in every process that maps it; returns the descriptor that holds the probe.

    The program reads a `cookie` other than 0 by bpf_get_attach_cookie.
    """
    what = f"{path}+{offset:#x}"
    try:
        if has_multi_links():
            return multi_link(program_fd, path, offset, at_return, cookie)
        event = perf_event(path, offset, at_return)
        return perf_link(program_fd, event, cookie) if cookie else connect(event, program_fd, what)
    except OSError as error:
        raise ProbeError(f"cannot attach to {what}: {why_denied(error.errno or 0) or error.strerror}") from None


def detach(fds: Iterable[int]) -> None:
    """Close the descriptors of probes concurrently: each close waits until no CPU can be inside the probe any more."""
    with ThreadPoolExecutor(CLOSERS) as pool:
        list(pool.map(os.close, fds))
