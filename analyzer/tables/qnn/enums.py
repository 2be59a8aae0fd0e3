"""QNN's numbers: event types, units, levels, scalar types and API calls; `enums.toml` names them as its documentation does."""

from enum import Enum

from moescope.packaged import toml_beside

DECLARED = toml_beside(__file__, "enums.toml")
CSV_TYPES: dict[str, int] = DECLARED.pop("csv_types")
NAMES: dict[str, dict[int, str]] = {
    section: {int(number): name for number, name in names.items()} for section, names in DECLARED.items()
}
EVENT_TYPES, UNITS, RESOURCES, LEVELS = (NAMES[section] for section in ("event_types", "units", "resources", "levels"))
CALLS, MAKES, FREES, STAGES = (NAMES[section] for section in ("calls", "makes", "frees", "stages"))

NODE, EXECUTE, QUEUE_WAIT = 404, 400, 405
HOST_RPC_US, HTP_RPC_US, ACCEL_CYCLES, ACCEL_US, ACCEL_EXCL_WAIT_US = 3001, 3002, 3003, 3004, 3012

UNIT_US, UNIT_CYCLES = 1, 3

UNSIGNED_BITS: dict[int, int] = {0x108: 8, 0x116: 16, 0x132: 32}
"""Scalar types narrower than the 64-bit field that carries them, and their width in bits."""

CONTEXT_CREATE, CONTEXT_FROM_BINARY, CONTEXT_FREE, GRAPH_CREATE, GRAPH_FINALIZE, GRAPH_RETRIEVE = 9, 13, 14, 15, 19, 20
CONTEXT_GET_BINARY, PROFILE_CREATE, WITH_SIGNAL, FROM_LIST, APPLY_SECTION, WITH_CALLBACK = 12, 28, 55, 56, 61, 68

FIRST_STAGE = 200


class Work(Enum):
    """The work that a profile event measures; the value lists the API calls that produce such events (() for graphExecute)."""

    INIT = (CONTEXT_CREATE, CONTEXT_FROM_BINARY, GRAPH_CREATE, GRAPH_RETRIEVE, WITH_SIGNAL, FROM_LIST, WITH_CALLBACK)
    FINALIZE = (GRAPH_FINALIZE,)
    EXECUTE = ()
    DEINIT = (CONTEXT_FREE,)
    APPLY = (APPLY_SECTION,)


WORK_OF_HUNDRED: dict[int, Work] = {1: Work.INIT, 3: Work.FINALIZE, 4: Work.EXECUTE, 5: Work.DEINIT}
WORK_OF_THOUSAND: dict[int, Work] = dict.fromkeys((3, 5, 6, 8), Work.EXECUTE)
WORK_OF_THOUSAND |= {1: Work.INIT, 2: Work.FINALIZE, 4: Work.DEINIT, 9: Work.APPLY}


def work_of(event_type: int) -> Work | None:
    """The work that an event type measures; None if the type does not determine it (NODE belongs to its parent)."""
    if event_type < 1000:
        return None if event_type == 404 else WORK_OF_HUNDRED.get(event_type // 100)
    return WORK_OF_THOUSAND.get(event_type // 1000)
