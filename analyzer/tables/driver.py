"""The table `driver_events`: events of the driver between CPU and NPU."""

import numpy as np

from analyzer.records.reading import Source
from analyzer.records.schema import Columns
from analyzer.tables.steps import Steps

FASTRPC = (
    *("context_alloc", "transport_send", "transport_send_ipcmsg", "transport_response", "context_interrupt", "context_restore"),
    *("context_complete", "context_free", "dma_map", "dma_alloc", "dspsignal"),
)
LATER = ("fastrpc_dma_unmap", "fastrpc_dma_free", "fastrpc_perf_counters")
EVENTS = np.array([*(f"fastrpc_{name}" for name in FASTRPC), "qcom_glink_cmd_tx_data", *LATER], object)
"""Names by enum driver_event of bpf/records.h."""
METHOD_BIT, METHODS = 24, 0x1F


def build_driver_events(source: Source, steps: Steps) -> Columns:
    """The columns of `driver_events`."""
    rows = source.rows("driver_event")
    columns = {name: rows[name] for name in ("pid", "tid", "handle", "status")}
    columns |= {name: rows.raw(name) for name in ("context", "value")}
    event, method = np.minimum(rows["event"], len(EVENTS) - 1), rows["scalars"] >> METHOD_BIT & METHODS
    return {**columns, "token_id": steps.of(rows), "event": EVENTS[event], "method": method, "ts_ns": rows["ts"]}
