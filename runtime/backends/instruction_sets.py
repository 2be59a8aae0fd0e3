"""Which instruction set computes products with quantized weights: the fastest of this processor, or the one asked for."""

import ctypes
import os
from functools import cache
from itertools import count, takewhile
from pathlib import Path

from runtime.errors import BackendError

LIBRARY = Path(__file__).with_name("_blocks.so")
FORCED_SET = "MOESCOPE_ISA"


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise BackendError(f"{LIBRARY} is not built: run `make build`")
    library = ctypes.CDLL(str(LIBRARY))
    library.moescope_instruction_set.argtypes = [ctypes.c_size_t]
    library.moescope_instruction_set.restype = library.moescope_chosen.restype = ctypes.c_char_p
    library.moescope_choose.argtypes, library.moescope_choose.restype = [ctypes.c_char_p], ctypes.c_bool
    return library


def instruction_sets() -> list[str]:
    """The instruction sets that this processor has kernels for, the fastest first; `plain` C is always the last."""
    return [name.decode() for name in takewhile(bool, map(_library().moescope_instruction_set, count()))]


def instruction_set() -> str:
    """The one in use: that of the environment's MOESCOPE_ISA, else the one chosen last, else the fastest."""
    if forced := os.environ.get(FORCED_SET):
        choose(forced)
    return str(_library().moescope_chosen().decode())


def choose(name: str) -> None:
    """Compute products with this instruction set from now on; BackendError where this processor lacks it."""
    if not _library().moescope_choose(name.encode()):
        known = ", ".join(instruction_sets())
        raise BackendError(f"there are no kernels for {name!r} on this processor: set {FORCED_SET} to one of {known}")
