"""What one probe hit costs on this machine, measured before every recording on empty functions."""

import ctypes
import os
import statistics

from tracer.elf import read_binary
from tracer.errors import RequirementError
from tracer.paths import CALIBRATION
from tracer.perf_events import attach_uprobe

CLASSES = {"emulated": (0, 2000), "stepped": (1, 300), "nop5": (2, 2000)}
REPEATS = 3


def measure(program_fd: int) -> dict[str, float]:
    """Nanoseconds per hit of an empty program, by cost class, and `return` for what a return probe adds to an emulated entry."""
    if not CALIBRATION.exists():
        raise RequirementError(f"{CALIBRATION.name} has not been built; run `make native`")
    library = ctypes.CDLL(str(CALIBRATION))
    library.calibrate.restype = ctypes.c_uint64
    binary = read_binary(str(CALIBRATION))

    def per_call(which: int, calls: int) -> float:
        library.calibrate(which, 10)
        return statistics.median(library.calibrate(which, calls) / calls for _ in range(REPEATS))

    cost: dict[str, float] = {}
    for name, (which, calls) in CLASSES.items():
        bare = per_call(which, calls)
        fd = attach_uprobe(program_fd, str(CALIBRATION), binary.symbol(f"calibrate_{name}") or 0, at_return=False)
        cost[name] = max(0.0, per_call(which, calls) - bare)
        os.close(fd)
    which, calls = CLASSES["emulated"]
    bare = per_call(which, calls)
    fd = attach_uprobe(program_fd, str(CALIBRATION), binary.symbol("calibrate_emulated") or 0, at_return=True)
    cost["return"] = max(0.0, per_call(which, calls) - bare)
    os.close(fd)
    return cost
