"""The tracepoints of the NPU's driver, and which of their fields are recorded."""

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
