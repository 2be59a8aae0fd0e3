"""Perf events: tracepoints and counters that run BPF programs, and buffers for the programs' output. Closing detaches."""

import ctypes
import fcntl
import os
import platform
import struct
from pathlib import Path

from tracer.errors import ProbeError, RequirementError
from tracer.probes.denials import why_denied
from tracer.probes.tracefs import tracefs, why_absent

PERF_TYPE_SOFTWARE, PERF_TYPE_TRACEPOINT = 1, 2
BPF_OUTPUT = 10  # the software event to which BPF programs write records
SAMPLE_RAW = 1 << 10
BY_BYTES = 1 << 14  # flag: wake the reader by bytes written, not by records
IOC_ENABLE, IOC_SET_BPF = 0x2400, 0x40042408
FLAG_CLOEXEC = 8
ATTR_BYTES = 128
HIGH_FD = 512
SYSCALL = {"x86_64": 298, "aarch64": 241}

libc = ctypes.CDLL(None, use_errno=True)


def open_event(attributes: bytes, tid: int, cpu: int) -> int:
    """perf_event_open(2) on a thread (-1: all) and a cpu (-1: all); raises OSError."""
    fd = libc.syscall(SYSCALL[platform.machine()], attributes, tid, cpu, -1, ctypes.c_ulong(FLAG_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


def opened(attributes: bytes, what: str, cpu: int = 0) -> int:
    """Open an event on all threads; `what` names it in the error."""
    try:
        return open_event(attributes, -1, cpu)
    except OSError as error:
        raise ProbeError(f"cannot probe {what}: {why_denied(error.errno or 0) or error.strerror}") from None


def connect(fd: int, program_fd: int, what: str) -> int:
    """Attach a program to an event and enable it; returns the event's descriptor."""
    try:
        fcntl.ioctl(fd, IOC_SET_BPF, program_fd)
        fcntl.ioctl(fd, IOC_ENABLE, 0)
    except OSError as error:
        os.close(fd)
        raise ProbeError(f"cannot attach to {what}: {error.strerror}") from None
    return fd


def set_aside(fd: int) -> int:
    """Move a descriptor to a high number: if the tracer is killed, the kernel then removes the target's probes before it."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    except OSError:
        return fd
    os.close(fd)
    return high


def attach_tracepoint(program_fd: int, category: str, name: str) -> int:
    """Run a program at a kernel tracepoint on all CPUs; returns the descriptor that holds it."""
    try:
        number = int((tracefs() / "events" / category / name / "id").read_text())
    except OSError as error:
        reason = why_denied(error.errno or 0) or ": ".join(why_absent()) or error.strerror
        raise RequirementError(f"tracepoint {category}:{name} cannot be read: {reason}") from None
    head = struct.pack("<IIQQ", PERF_TYPE_TRACEPOINT, ATTR_BYTES, number, 1)
    what = f"tracepoint {category}:{name}"
    return set_aside(connect(opened(head.ljust(ATTR_BYTES, b"\0"), what), program_fd, what))


def open_output(cpu: int, wakeup_bytes: int) -> int:
    """Open an event for BPF output on one CPU; wakes its reader after `wakeup_bytes`, or at every record if that is 0."""
    flags, wakeup = (BY_BYTES, wakeup_bytes) if wakeup_bytes else (0, 1)
    head = struct.pack("<IIQQQQQI", PERF_TYPE_SOFTWARE, ATTR_BYTES, BPF_OUTPUT, 1, SAMPLE_RAW, 0, flags, wakeup)
    what = f"a perf buffer on CPU {cpu}"
    fd = opened(head.ljust(ATTR_BYTES, b"\0"), what, cpu)
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
            fds.append(connect(opened(head.ljust(ATTR_BYTES, b"\0"), what, cpu), program_fd, what))
    except ProbeError:
        for fd in fds:
            os.close(fd)
        raise
    return fds
