"""QNN's numbers: event types, units, levels, scalar types and API calls, by the names its documentation uses."""

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

NODE, EXECUTE, QUEUE_WAIT = 404, 400, 405
HOST_RPC_US, HTP_RPC_US, ACCEL_CYCLES, ACCEL_US, ACCEL_EXCL_WAIT_US = 3001, 3002, 3003, 3004, 3012

UNITS: dict[int, str] = {1: "us", 2: "bytes", 3: "cycles", 4: "count", 5: "object", 1000: "backend"}
UNIT_US, UNIT_CYCLES = 1, 3

UNSIGNED_BITS: dict[int, int] = {0x108: 8, 0x116: 16, 0x132: 32}
"""Scalar types narrower than the 64-bit field that carries them, and their width in bits."""

RESOURCES: dict[int, str] = {1: "HVX", 2: "HMX", 4: "DMA"}
"""Bits of NODE_RESOURCEMASK."""

LEVELS: dict[int, str] = {0: "off", 1: "basic", 2: "detailed", 7001: "linting"}
"""Levels of a profile; 0: the call was given none."""

CALLS: dict[int, str] = {
    1: "backendCreate",
    9: "contextCreate",
    12: "contextGetBinary",
    13: "contextCreateFromBinary",
    14: "contextFree",
    15: "graphCreate",
    19: "graphFinalize",
    20: "graphRetrieve",
    22: "graphExecuteAsync",
    28: "profileCreate",
    34: "profileFree",
    35: "memRegister",
    40: "deviceCreate",
    55: "contextCreateFromBinaryWithSignal",
    56: "contextCreateFromBinaryListAsync",
}
CONTEXT_CREATE, CONTEXT_FROM_BINARY, CONTEXT_FREE, GRAPH_CREATE, GRAPH_FINALIZE, GRAPH_RETRIEVE = 9, 13, 14, 15, 19, 20
CONTEXT_GET_BINARY, PROFILE_CREATE, MEM_REGISTER, WITH_SIGNAL, FROM_LIST = 12, 28, 35, 55, 56

MAKES: dict[int, str] = {
    1: "backend",
    CONTEXT_CREATE: "context",
    CONTEXT_FROM_BINARY: "context",
    GRAPH_CREATE: "graph",
    GRAPH_RETRIEVE: "graph",
    PROFILE_CREATE: "profile",
    MEM_REGISTER: "memory",
    40: "device",
    WITH_SIGNAL: "context",
}
"""Calls that make an object, and its kind."""

FREES: dict[int, str] = {8: "backend", CONTEXT_FREE: "context", 34: "profile", 36: "memory", 43: "device"}

FIRST_STAGE = 200
STAGES: dict[int, str] = {
    200: "context read",
    201: "context load",
    202: "context create",
    203: "compose",
    204: "finalize",
    205: "context serialize",
    206: "execute",
    207: "harvest",
}
"""Stages of the host's side, by enum qnn_call of bpf/records.h."""


class Work(Enum):
    """What a profile event is about; the value is the API calls that such events come from (() for graphExecute)."""

    INIT = (CONTEXT_CREATE, CONTEXT_FROM_BINARY, GRAPH_CREATE, GRAPH_RETRIEVE, WITH_SIGNAL, FROM_LIST)
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
    """Which kind of call an event type belongs to; None where the type leaves it open (NODE belongs to its parent)."""
    if event_type < 1000:
        return None if event_type == 404 else WORK_OF_HUNDRED.get(event_type // 100)
    return WORK_OF_THOUSAND.get(event_type // 1000)
