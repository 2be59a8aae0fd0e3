"""QNN's numbers: profile event types, units, scalar types and API calls, by the names its documentation uses."""

from enum import Enum

EVENT_TYPES: dict[int, str] = {
    100: "INIT",
    300: "FINALIZE",
    400: "EXECUTE",
    404: "NODE",
    405: "EXECUTE_QUEUE_WAIT",
    406: "EXECUTE_PREPROCESS",
    407: "EXECUTE_DEVICE",
    408: "EXECUTE_POSTPROCESS",
    500: "DEINIT",
    600: "TRACE",
    1002: "CONTEXT_LOAD_BIN_HOST_RPC_TIME_MICROSEC",
    1003: "CONTEXT_LOAD_BIN_HTP_RPC_TIME_MICROSEC",
    1004: "CONTEXT_LOAD_BIN_ACCEL_TIME_MICROSEC",
    2001: "GRAPH_FINALIZE_HOST_RPC_TIME_MICROSEC",
    2002: "GRAPH_FINALIZE_HTP_RPC_TIME_MICROSEC",
    2003: "GRAPH_FINALIZE_ACCEL_TIME_MICROSEC",
    3001: "GRAPH_EXECUTE_HOST_RPC_TIME_MICROSEC",
    3002: "GRAPH_EXECUTE_HTP_RPC_TIME_MICROSEC",
    3003: "GRAPH_EXECUTE_ACCEL_TIME_CYCLE",
    3004: "GRAPH_EXECUTE_ACCEL_TIME_MICROSEC",
    3005: "GRAPH_EXECUTE_MISC_ACCEL_TIME_MICROSEC",
    3006: "GRAPH_EXECUTE_YIELD_INSTANCE_RELEASE_TIME",
    3007: "GRAPH_EXECUTE_YIELD_INSTANCE_WAIT_TIME",
    3008: "GRAPH_EXECUTE_YIELD_INSTANCE_RESTORE_TIME",
    3009: "GRAPH_EXECUTE_YIELD_COUNT",
    3010: "GRAPH_EXECUTE_VTCM_ACQUIRE_TIME",
    3011: "GRAPH_EXECUTE_RESOURCE_POWER_UP_TIME",
    3012: "GRAPH_EXECUTE_ACCEL_EXCL_WAIT_TIME_MICROSEC",
    4001: "GRAPH_DEINIT_HOST_RPC_TIME_MICROSEC",
    4002: "GRAPH_DEINIT_HTP_RPC_TIME_MICROSEC",
    4003: "GRAPH_DEINIT_ACCEL_TIME_MICROSEC",
    5001: "NODE_WAIT",
    5002: "NODE_OVERLAP",
    5003: "NODE_WAIT_OVERLAP",
    5004: "NODE_RESOURCEMASK",
    5005: "NODE_CRITICAL_BG_OP_ID",
    5006: "NODE_WAIT_BG_OP_ID",
    6001: "GRAPH_EXECUTE_CRITICAL_ACCEL_TIME_CYCLE",
    8001: "GRAPH_NUMBER_OF_HVX_THREADS",
    9001: "GRAPH_APPLY_BINARY_SECTION_QNN",
    9002: "GRAPH_APPLY_BINARY_SECTION_RPC",
    9003: "GRAPH_APPLY_BINARY_SECTION_QNN_ACC",
    9004: "GRAPH_APPLY_BINARY_SECTION_ACC",
}

HOST_RPC_US, HTP_RPC_US, ACCEL_CYCLES, ACCEL_US = 3001, 3002, 3003, 3004

UNITS: dict[int, str] = {1: "us", 2: "bytes", 3: "cycles", 4: "count", 5: "object", 1000: "backend"}
UNIT_US, UNIT_CYCLES = 1, 3

UNSIGNED_BITS: dict[int, int] = {0x108: 8, 0x116: 16, 0x132: 32}
"""Scalar types narrower than the 64-bit field that carries them, and their width in bits."""

"""Bits of NODE_RESOURCEMASK."""

CALLS: dict[int, str] = {
    1: "backendCreate",
    9: "contextCreate",
    13: "contextCreateFromBinary",
    14: "contextFree",
    15: "graphCreate",
    19: "graphFinalize",
    20: "graphRetrieve",
    28: "profileCreate",
    34: "profileFree",
}
CONTEXT_CREATE, CONTEXT_FROM_BINARY, CONTEXT_FREE, GRAPH_CREATE, GRAPH_FINALIZE, GRAPH_RETRIEVE = 9, 13, 14, 15, 19, 20


class Work(Enum):
    """What a profile event tells about; the value is the API calls that such events come from (() for graphExecute)."""

    INIT = (CONTEXT_CREATE, CONTEXT_FROM_BINARY, GRAPH_CREATE, GRAPH_RETRIEVE)
    FINALIZE = (GRAPH_FINALIZE,)
    EXECUTE = ()
    DEINIT = (CONTEXT_FREE,)


WORK_OF_HUNDRED: dict[int, Work] = {1: Work.INIT, 3: Work.FINALIZE, 4: Work.EXECUTE, 5: Work.DEINIT}
WORK_OF_THOUSAND: dict[int, Work] = {
    1: Work.INIT,
    2: Work.FINALIZE,
    3: Work.EXECUTE,
    4: Work.DEINIT,
    5: Work.EXECUTE,
    6: Work.EXECUTE,
    8: Work.EXECUTE,
}


def work_of(event_type: int) -> Work | None:
    """Which kind of call an event type belongs to; None where the type does not tell (NODE belongs to its parent)."""
    if event_type < 1000:
        return None if event_type == 404 else WORK_OF_HUNDRED.get(event_type // 100)
    return WORK_OF_THOUSAND.get(event_type // 1000)
