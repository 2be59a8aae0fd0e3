"""The C loops of _joins.c and _replay.c as functions of contiguous NumPy arrays, int64 unless stated otherwise."""

import ctypes
from pathlib import Path

import numpy as np
from numpy.ctypeslib import ndpointer

from analyzer.errors import AnalysisError

TYPES = (np.int64, None, np.uint16, np.uint64, np.float64)
N, COLUMN, SLOTS, KINDS, TIMES, REALS = ctypes.c_int64, *(ndpointer(dtype, flags="C") for dtype in TYPES)
ARGUMENTS = {
    "latest": (N, COLUMN, COLUMN, N, COLUMN, COLUMN, N, COLUMN, COLUMN),
    "following": (N, COLUMN, COLUMN, N, COLUMN, COLUMN, N, COLUMN, COLUMN),
    "extent": (N, COLUMN, COLUMN),
    "pairs": (N, *[COLUMN] * 3, N, *[COLUMN] * 6),
    "distinct": (N, N, ctypes.c_void_p, *[COLUMN] * 5),
    "gather": (SLOTS, N, N, N, COLUMN, COLUMN, N, COLUMN, COLUMN),
    "by_kind": (SLOTS, N, N, ctypes.c_uint64, ctypes.c_uint64, KINDS, COLUMN, COLUMN, TIMES),
    "states": (N, N, N, COLUMN, N, *[COLUMN] * 3),
    "replay": (N, N, COLUMN, COLUMN, REALS, ctypes.c_double, N, N, COLUMN, COLUMN, REALS, COLUMN),
}


def _load_library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_joins.so")))
        for name, types in ARGUMENTS.items():
            getattr(library, name).argtypes, getattr(library, name).restype = types, N
    except (OSError, AttributeError):
        raise AnalysisError("analyzer/records/_joins.so is not built, or not from this source: run `make build`") from None
    return library


loops = _load_library()
