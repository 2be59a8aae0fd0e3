"""Attaching: one perf event per probe, whichever loader made the program. Closing the descriptor detaches, even on SIGKILL."""

import ctypes
import fcntl
import os
import platform
import struct
from pathlib import Path

from tracer.errors import ProbeError, RequirementError

PERF_TYPE_TRACEPOINT = 2
IOC_ENABLE, IOC_SET_BPF = 0x2400, 0x40042408
BPF_LINK_CREATE, BPF_PERF_EVENT = 28, 41
FLAG_CLOEXEC = 8
ATTR_BYTES = 128
SYSCALL = {"x86_64": 298, "aarch64": 241}
BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
UPROBE = Path("/sys/bus/event_source/devices/uprobe")
TRACEFS = Path("/sys/kernel/tracing")

libc = ctypes.CDLL(None, use_errno=True)


def _open(attributes: bytes, what: str) -> int:
    number = SYSCALL[platform.machine()]
    fd = libc.syscall(number, attributes, -1, 0, -1, ctypes.c_ulong(FLAG_CLOEXEC))
    if fd < 0:
        raise ProbeError(f"cannot probe {what}: {os.strerror(ctypes.get_errno())}")
    return int(fd)


def _connect(fd: int, program_fd: int, what: str) -> int:
    try:
        fcntl.ioctl(fd, IOC_SET_BPF, program_fd)
        fcntl.ioctl(fd, IOC_ENABLE, 0)
    except OSError as error:
        os.close(fd)
        raise ProbeError(f"cannot attach to {what}: {error.strerror}") from None
    return fd


def _link(fd: int, program_fd: int, cookie: int, what: str) -> int:
    """Connect through a link, which carries a number that the program can ask for (Linux 5.15)."""
    attributes = struct.pack("<IIIIQ", program_fd, fd, BPF_PERF_EVENT, 0, cookie)
    number = ctypes.c_long(BPF_SYSCALL[platform.machine()])
    link = libc.syscall(number, ctypes.c_int(BPF_LINK_CREATE), attributes, ctypes.c_uint(len(attributes)))
    reason = os.strerror(ctypes.get_errno())
    os.close(fd)
    if link < 0:
        raise ProbeError(f"cannot attach to {what}: {reason}; probes on functions of your own need Linux 5.15 or later")
    return int(link)


def attach_uprobe(program_fd: int, path: str, offset: int, at_return: bool, cookie: int = 0) -> int:
    """Probe byte `offset` of the file `path` in every process that maps it; returns the descriptor that holds the probe.

    The program finds a `cookie` other than 0 with bpf_get_attach_cookie.
    """
    try:
        kind = int((UPROBE / "type").read_text())
        bit = int((UPROBE / "format" / "retprobe").read_text().split(":")[1])
    except OSError:
        raise RequirementError("this kernel has no uprobes (CONFIG_UPROBE_EVENTS)") from None
    text = ctypes.create_string_buffer(path.encode())
    config = 1 << bit if at_return else 0
    # struct perf_event_attr: type, size, config, period, sample_type, read_format, flags, wakeup, bp_type, config1, config2
    head = struct.pack("<IIQQQQQIIQQ", kind, ATTR_BYTES, config, 0, 0, 0, 0, 0, 0, ctypes.addressof(text), offset)
    what = f"{path}+{offset:#x}"
    fd = _open(head.ljust(ATTR_BYTES, b"\0"), what)
    return _link(fd, program_fd, cookie, what) if cookie else _connect(fd, program_fd, what)


def attach_tracepoint(program_fd: int, category: str, name: str) -> int:
    """Run a program at a kernel tracepoint on all CPUs; returns the descriptor that holds it."""
    try:
        number = int((TRACEFS / "events" / category / name / "id").read_text())
    except OSError:
        raise RequirementError(
            f"tracepoint {category}:{name} is not there; mount tracefs: mount -t tracefs tracefs {TRACEFS}"
        ) from None
    head = struct.pack("<IIQQ", PERF_TYPE_TRACEPOINT, ATTR_BYTES, number, 1)
    what = f"tracepoint {category}:{name}"
    return _connect(_open(head.ljust(ATTR_BYTES, b"\0"), what), program_fd, what)


def mount_tracefs() -> None:
    """Mount tracefs at its standard place where nothing is mounted there; a kernel that refuses is reported at attach."""
    if not (TRACEFS / "events").exists():
        libc.mount(b"tracefs", bytes(TRACEFS), b"tracefs", 0, None)
