"""Raw programs at tracepoints: they get events in interrupts whatever else runs on that CPU. Closing detaches."""

import ctypes
import struct

from tracer.errors import ProbeError
from tracer.probes.denials import why_denied
from tracer.probes.perf_events import set_aside
from tracer.probes.uprobes import bpf

RAW_TRACEPOINT_OPEN = 17


def attach_raw(program_fd: int, category: str, name: str) -> int:
    """Run a raw program at a kernel tracepoint on all CPUs; returns the descriptor that holds it."""
    text = ctypes.create_string_buffer(name.encode())
    try:
        return set_aside(bpf(RAW_TRACEPOINT_OPEN, struct.pack("<QII", ctypes.addressof(text), program_fd, 0)))
    except OSError as error:
        why = why_denied(error.errno or 0) or error.strerror
        raise ProbeError(f"cannot attach to tracepoint {category}:{name}: {why}") from None
