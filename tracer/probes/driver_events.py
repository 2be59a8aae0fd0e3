"""The tracepoints of the NPU's driver: which of their fields are recorded, and their offsets in this kernel."""

import re
import struct

from tracer.probes.tracefs import tracefs

CALL = ("smq_ctx", "ctx", "handle", "sc", "")
DRIVER_EVENTS = {
    "fastrpc_context_alloc": CALL,
    "fastrpc_transport_send": CALL,
    "fastrpc_transport_send_ipcmsg": CALL,
    "fastrpc_transport_response": ("", "ctx", "", "", "retval"),
    "fastrpc_context_interrupt": CALL,
    "fastrpc_context_restore": CALL,
    "fastrpc_context_complete": (*CALL[:4], "retval"),
    "fastrpc_context_free": CALL,
    "fastrpc_dma_map": ("", "len", "fd", "", ""),
    "fastrpc_dma_alloc": ("", "size", "", "", ""),
    "fastrpc_dspsignal": ("buf", "timeout", "signal_id", "", "state"),
    "qcom_glink_cmd_tx_data": ("channel", "chunk_size", "tx", "", ""),
    "fastrpc_dma_unmap": ("", "size", "", "", ""),
    "fastrpc_dma_free": ("", "size", "", "", ""),
    "fastrpc_perf_counters": ("", "invoke", "handle", "sc", ""),
}
"""Tracepoint → its fields for context, value, handle, scalars and status of the record; in the order of enum driver_event."""
CATEGORIES = ("fastrpc", "qcom_glink")
DRIVER_PROBES = [(name, "graph", next(c for c in CATEGORIES if name.startswith(c))) for name in DRIVER_EVENTS]
"""(program, level, category); hardly any kernel has them."""
FIELD = re.compile(r"field:(__data_loc )?[^;]*?(\w+)(?:\[\d*\])?;\s*offset:(\d+);\s*size:(\d+);")
LETTERS = 8  # of a text


def driver_layout(name: str, format_text: str) -> bytes:
    """struct driver_layout of bpf/structs.h, from the tracepoint's `format` in tracefs."""
    places = {
        field: (int(offset), LETTERS if is_text else int(size), bool(is_text))
        for is_text, field, offset, size in FIELD.findall(format_text)
    }
    return b"".join(struct.pack("<IHH", *places.get(field, (0, 0, 0))) for field in DRIVER_EVENTS[name])


def driver_layouts(names: list[str]) -> dict[int, bytes]:
    """Event number → struct driver_layout with the offsets of its fields in this kernel."""
    numbers = {name: number for number, name in enumerate(DRIVER_EVENTS)}
    places = {name: tracefs() / "events" / category / name / "format" for name, _, category in DRIVER_PROBES}
    return {numbers[name]: driver_layout(name, places[name].read_text()) for name in names if name in numbers}
