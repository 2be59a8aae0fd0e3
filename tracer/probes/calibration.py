"""Cost of a probe hit on this machine, measured on empty functions before every recording."""

import ctypes
import os

from tracer.errors import RequirementError
from tracer.probes.elf import read_binary
from tracer.probes.uprobes import attach_uprobe
from tracer.recording.paths import CALIBRATION

# cost class → (function of calibrate.c, symbol, at return, calls)
CASES = {
    "emulated": (0, "calibrate_emulated", False, 1000),
    "stepped": (1, "calibrate_stepped", False, 100),
    "nop5": (2, "calibrate_nop5", False, 1000),
    "return": (0, "calibrate_emulated", True, 1000),
}
COLD_BYTES, COLD_CALLS = 2 << 20, 60
REPEATS = 5
UNKNOWN = {f"{heat}{name}": 0.0 for name in CASES for heat in ("", "cold_")}
"""The costs if the kernel refused the program to measure them with."""


def measure(program_fd: int) -> dict[str, float]:
    """Nanoseconds per hit of an empty program, by cost class; `return` is an entry probe and its return probe together.

    In classes `cold_<class>` other data fills the caches between hits, as in a program that works on a few MiB; the real cost
    lies between the two. Other activity on the machine only adds time, so the minimum of several rounds is taken. A stepped
    instruction traps twice, so its cost is at least that of an emulated one.
    """
    if not CALIBRATION.exists():
        raise RequirementError(f"{CALIBRATION.name} has not been built; run `make build`")
    library = ctypes.CDLL(str(CALIBRATION))
    library.calibrate.restype = ctypes.c_uint64
    library.calibrate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    binary = read_binary(str(CALIBRATION))

    def per_call(which: int, calls: int, other_bytes: int) -> float:
        return min(library.calibrate(which, calls, other_bytes) / calls for _ in range(REPEATS))

    cost: dict[str, float] = {}
    for name, (which, symbol, at_return, calls) in CASES.items():
        kinds = {name: (which, calls, 0), f"cold_{name}": (which, COLD_CALLS, COLD_BYTES)}
        bare = {kind: per_call(*case) for kind, case in kinds.items()}
        fd = attach_uprobe(program_fd, str(CALIBRATION), binary.symbol(symbol) or 0, at_return)
        cost |= {kind: max(0.0, per_call(*case) - bare[kind]) for kind, case in kinds.items()}
        os.close(fd)
    least = {f"{heat}emulated": min(cost[f"{heat}emulated"], cost[f"{heat}stepped"]) for heat in ("", "cold_")}
    return cost | least
