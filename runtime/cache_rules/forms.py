"""The forms that an expert cache keeps, reasons for loads, and states of a form when a layer began."""

from enum import IntEnum
from typing import NamedTuple

CPU, HTP = 1, 2
BACKENDS = {CPU: "cpu", HTP: "htp"}
"""Backends by number, as in probes and recordings."""


class Form(NamedTuple):
    """An expert as one backend runs it. `tier`: the rows of its static shape, 0 if dynamic."""

    layer: int
    expert: int
    backend: int
    tier: int


class Cache(IntEnum):
    """An expert's state when its layer began; the values are arguments of probes."""

    HIT = 1
    MISS = 2
    PREFETCHED = 3


class Reason(IntEnum):
    """Why an expert was loaded; the values are arguments of probes."""

    STARTUP = 0
    DEMAND = 1
    PREFETCH = 2
