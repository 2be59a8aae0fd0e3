"""Attaching: one perf event per probe, whichever loader made the program. Closing the descriptor detaches, even on SIGKILL."""

import ctypes
import fcntl
import os
import platform
import struct
from pathlib import Path

from tracer.errors import ProbeError, RequirementError

PERF_TYPE_SOFTWARE, PERF_TYPE_TRACEPOINT = 1, 2
BPF_OUTPUT = 10  # software event that BPF programs write records to
SAMPLE_RAW = 1 << 10
BY_BYTES = 1 << 14  # flag: wake the reader by bytes written, not by records
IOC_ENABLE, IOC_SET_BPF = 0x2400, 0x40042408
BPF_LINK_CREATE, BPF_PERF_EVENT = 28, 41
FLAG_CLOEXEC = 8
ATTR_BYTES = 128
HIGH_FD = 512
SYSCALL = {"x86_64": 298, "aarch64": 241}
BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
UPROBE = Path("/sys/bus/event_source/devices/uprobe")
TRACEFS = Path("/sys/kernel/tracing")

libc = ctypes.CDLL(None, use_errno=True)


def open_event(attributes: bytes, tid: int, cpu: int) -> int:
    """perf_event_open(2) on a thread (-1: all) and a cpu (-1: all); raises OSError."""
    fd = libc.syscall(SYSCALL[platform.machine()], attributes, tid, cpu, -1, ctypes.c_ulong(FLAG_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


def _open(attributes: bytes, what: str, cpu: int = 0) -> int:
    try:
        return open_event(attributes, -1, cpu)
    except OSError as error:
        raise ProbeError(f"cannot probe {what}: {error.strerror}") from None


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


def set_aside(fd: int) -> int:
    """The descriptor under a high number: should the tracer be killed, the kernel removes the probes in the target before it."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    except OSError:
        return fd
    os.close(fd)
    return high


def has_tracepoint(category: str, name: str) -> bool:
    """Whether this kernel offers a tracepoint."""
    return (TRACEFS / "events" / category / name / "id").exists()


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
    return set_aside(_connect(_open(head.ljust(ATTR_BYTES, b"\0"), what), program_fd, what))


def open_output(cpu: int, wakeup_bytes: int) -> int:
    """An event that takes what BPF programs output on one CPU; wakes its reader after so many bytes, with 0 at every record."""
    flags, wakeup = (BY_BYTES, wakeup_bytes) if wakeup_bytes else (0, 1)
    head = struct.pack("<IIQQQQQI", PERF_TYPE_SOFTWARE, ATTR_BYTES, BPF_OUTPUT, 1, SAMPLE_RAW, 0, flags, wakeup)
    what = f"a perf buffer on CPU {cpu}"
    fd = _open(head.ljust(ATTR_BYTES, b"\0"), what, cpu)
    fcntl.ioctl(fd, IOC_ENABLE, 0)
    return fd


def online_cpus() -> list[int]:
    """Numbers of the CPUs that are online."""
    ranges = Path("/sys/devices/system/cpu/online").read_text().strip().split(",")
    bounds = (tuple(map(int, part.split("-"))) for part in ranges)
    return [cpu for bound in bounds for cpu in range(bound[0], bound[-1] + 1)]


def attach_software(program_fd: int, config: int, what: str) -> list[int]:
    """Run a program at every occurrence of a software event; returns the descriptors that hold it, one per CPU."""
    fds: list[int] = []
    try:
        for cpu in online_cpus():
            head = struct.pack("<IIQQ", PERF_TYPE_SOFTWARE, ATTR_BYTES, config, 1)
            fds.append(_connect(_open(head.ljust(ATTR_BYTES, b"\0"), what, cpu), program_fd, what))
    except ProbeError:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def mount_tracefs() -> None:
    """Mount tracefs at its standard place where nothing is mounted there; a kernel that refuses is reported at attach."""
    if not (TRACEFS / "events").exists():
        libc.mount(b"tracefs", bytes(TRACEFS), b"tracefs", 0, None)
