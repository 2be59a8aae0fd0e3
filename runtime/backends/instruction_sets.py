"""The instruction set for products with quantized weights: this processor's fastest, or the chosen one."""

import ctypes
import os
from functools import cache
from itertools import count, takewhile
from pathlib import Path

from runtime.errors import BackendError

LIBRARY = Path(__file__).with_name("_blocks.so")
FORCED_SET = "MOESCOPE_ISA"


@cache
def _kernel_library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise BackendError(f"{LIBRARY} is not built: run `make build`")
    library = ctypes.CDLL(str(LIBRARY))
    library.moescope_instruction_set.argtypes = [ctypes.c_size_t]
    library.moescope_instruction_set.restype = library.moescope_chosen.restype = ctypes.c_char_p
    library.moescope_choose.argtypes, library.moescope_choose.restype = [ctypes.c_char_p], ctypes.c_bool
    return library


def instruction_sets() -> list[str]:
    """The instruction sets with kernels that this processor can run, the fastest first; `plain` C is always the last."""
    return [name.decode() for name in takewhile(bool, map(_kernel_library().moescope_instruction_set, count()))]


def instruction_set() -> str:
    """The one in use: from the environment's MOESCOPE_ISA, else the one chosen last, else the fastest."""
    if forced := os.environ.get(FORCED_SET):
        use_instruction_set(forced)
    return str(_kernel_library().moescope_chosen().decode())


def use_instruction_set(name: str) -> None:
    """Compute products with this instruction set from now on; raises BackendError if this processor lacks it."""
    if not _kernel_library().moescope_choose(name.encode(errors="replace")):
        known = ", ".join(instruction_sets())
        raise BackendError(f"there are no kernels for {name!r} on this processor: set {FORCED_SET} to one of {known}")
