"""Uprobes without the recorder, for guests and benchmarks that ask what the kernel itself does; closing a descriptor detaches."""

import ctypes
import fcntl
import os
import platform
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[platform.machine()]
UPROBE = Path("/sys/bus/event_source/devices/uprobe")
ATTR_BYTES, FLAG_CLOEXEC = 128, 8
IOC_ENABLE, IOC_SET_BPF = 0x2400, 0x40042408
CLOSERS = 32

libc = ctypes.CDLL(None, use_errno=True)


def call_for_descriptor(number: int, *arguments: object) -> int:
    """What a system call returns; raises OSError."""
    fd = int(libc.syscall(ctypes.c_long(number), *arguments))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def perf_event(path: str, offset: int, at_return: bool = False) -> int:
    """A perf event that counts what CPU 0 hits at an offset of a file, not yet enabled; raises OSError."""
    kind = int((UPROBE / "type").read_text())
    bit = int((UPROBE / "format" / "retprobe").read_text().split(":")[1])
    text, config = ctypes.create_string_buffer(path.encode()), 1 << bit if at_return else 0
    # struct perf_event_attr: type, size, config, period, sample_type, read_format, flags, wakeup, bp_type, config1, config2
    head = struct.pack("<IIQQQQQIIQQ", kind, ATTR_BYTES, config, 0, 0, 0, 0, 0, 0, ctypes.addressof(text), offset)
    numbers = (ctypes.c_int(number) for number in (-1, 0, -1))  # all threads, CPU 0, no group
    return call_for_descriptor(PERF_EVENT_OPEN, head.ljust(ATTR_BYTES, b"\0"), *numbers, ctypes.c_ulong(FLAG_CLOEXEC))


def enable_event(event: int) -> None:
    """Let an event count."""
    fcntl.ioctl(event, IOC_ENABLE, 0)


def attach_uprobe(program_fd: int, path: str, offset: int, at_return: bool = False) -> int:
    """Run a program at an offset of a file by a perf event, in every process and on every CPU; raises OSError."""
    event = perf_event(path, offset, at_return)
    fcntl.ioctl(event, IOC_SET_BPF, program_fd)
    enable_event(event)
    return event


def detach_all(fds: Iterable[int]) -> None:
    """Close the descriptors of probes concurrently: each close waits until no CPU can be inside the probe any more."""
    with ThreadPoolExecutor(CLOSERS) as pool:
        list(pool.map(os.close, fds))
