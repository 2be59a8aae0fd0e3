"""The recorder's small policies (tracer/recorder), callable."""

import ctypes
import tempfile
import weakref
from collections.abc import Iterable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tracer.recording.format import STREAMS
from workloads import ROOT
from workloads.compiling import compile_c

SOURCES = ("growing", "steps", "slow_steps", "latency", "speed", "budget", "event_format")


class Change(NamedTuple):
    """A level that is switched."""

    ts_ns: int
    level: str
    on: bool
    tps: float
    why: str


class Window(NamedTuple):
    """A time with levels on or off, and the typical time of its steps."""

    on: bool
    step_ns: float


class Field(Structure):
    """struct driver_field."""

    _fields_ = (("offset", c_uint32), ("width", c_uint16), ("is_text", c_uint16))


class LevelCost(Structure):
    """struct level_cost."""

    _fields_ = (("name", c_char_p), ("ns", c_double))


class CChange(Structure):
    """struct change."""

    _fields_ = (
        *(("ts_ns", c_uint64), ("done_ns", c_uint64), ("level", c_char_p), ("on", c_bool)),
        *(("tps", c_double), ("why", c_char * 96)),
    )


class LatencyError(Structure):
    """struct latency_error."""

    _fields_ = (("steps", c_int), ("median", c_double), ("p90", c_double), ("bias", c_double))


class CWindow(Structure):
    """struct window."""

    _fields_ = (("on", c_bool), ("step_ns", c_double))


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "new_filter": (c_void_p, [c_uint64, c_uint64]),
    "free_filter": (None, [c_void_p]),
    "turn_filter": (None, [c_void_p, POINTER(c_void_p), POINTER(c_size_t), c_uint64, c_bool]),
    "kept_of": (c_void_p, [c_void_p, c_int, POINTER(c_size_t)]),
    "held_in": (c_uint64, [c_void_p]),
    "fast_steps": (c_uint64, [c_void_p]),
    "dropped_of": (c_uint64, [c_void_p, c_int]),
    "count_misses": (c_int, [c_void_p, c_size_t, c_uint32, c_uint64, c_uint64]),
    "new_controller": (c_void_p, [c_double]),
    "hold_of": (c_uint64, [c_void_p]),
    "observe_duration": (None, [c_void_p, c_uint64]),
    "speed": (c_double, [c_void_p]),
    "decide": (c_bool, [c_void_p, c_uint64, POINTER(LevelCost), c_int, POINTER(CChange)]),
    "new_explanation": (c_void_p, [c_double]),
    "observe_step": (None, [c_void_p, c_uint32, c_int, c_double, c_bool]),
    "explains_speed": (c_bool, [c_void_p]),
    "coefficient_of": (c_double, [c_void_p, c_int]),
    "error_of": (LatencyError, [c_void_p]),
    "new_budget": (c_void_p, [c_double, c_double]),
    "observe_all": (None, [c_void_p, c_bool, c_bool, POINTER(c_double), c_int]),
    "is_window_over": (c_bool, [c_void_p, c_bool, c_uint64, c_uint64]),
    "slowdown_while_on": (c_bool, [c_void_p, POINTER(c_double)]),
    "lost_share": (c_bool, [c_void_p, POINTER(c_double)]),
    "read_field": (None, [c_char_p, c_char_p, POINTER(Field)]),
    "windows_of": (POINTER(CWindow), [c_void_p, POINTER(c_int)]),
}


@cache
def load_library() -> ctypes.CDLL:
    """The policies, compiled once."""
    folder = ROOT / "tracer" / "recorder"
    with tempfile.TemporaryDirectory() as place:
        sources = [str(folder / f"{name}.c") for name in SOURCES]
        flags = ("-std=gnu11", "-shared", "-fPIC", f"-I{folder}", f"-I{ROOT / 'bpf'}")
        answer = ctypes.CDLL(str(compile_c(Path(place) / "policies.so", "policies.c", *sources, flags=flags)))
    for name, (result, arguments) in SIGNATURES.items():
        getattr(answer, name).restype, getattr(answer, name).argtypes = result, arguments
    return answer


def field_in(format_path: Path, name: str) -> tuple[int, int, int]:
    """(offset, width, whether it is a text) of a tracepoint's field; zeros if there is no such field."""
    field = Field()
    load_library().read_field(str(format_path).encode(), name.encode(), byref(field))
    return field.offset, field.width, field.is_text


class Filter:
    """`--only-slower-than`, with the pairing of steps that it is used with."""

    def __init__(self, limit_ns: int, kinds: dict[int, str], bound_bytes: int = 64 << 20):
        self.kinds, self._lib = kinds, load_library()
        self._at = self._lib.new_filter(limit_ns, bound_bytes)
        weakref.finalize(self, self._lib.free_filter, self._at)

    def sift(self, batches: dict[str, np.ndarray], until_ns: int, last: bool = False) -> dict[str, np.ndarray]:
        """The records to write now."""
        parts = [np.ascontiguousarray(batches[name]) for name in STREAMS]
        places = (c_void_p * len(parts))(*(part.ctypes.data for part in parts))
        sizes = (c_size_t * len(parts))(*(part.nbytes for part in parts))
        self._lib.turn_filter(self._at, places, sizes, until_ns, last)
        return {name: self._kept(number, width) for number, (name, width) in enumerate(STREAMS.items())}

    def _kept(self, number: int, width: int) -> np.ndarray:
        size = c_size_t()
        at = self._lib.kept_of(self._at, number, byref(size))
        data = ctypes.string_at(at, size.value) if size.value else b""
        return np.frombuffer(data, np.uint8).reshape(-1, width)

    def held_bytes(self) -> int:
        """Bytes of records whose steps are undecided."""
        return int(self._lib.held_in(self._at))

    def to_json(self) -> dict[str, Any]:
        """Counts of what was dropped."""
        counts = {name: int(self._lib.dropped_of(self._at, number)) for number, name in self.kinds.items()}
        return {"tokens": self._lib.fast_steps(self._at), "records": {name: n for name, n in counts.items() if n}}


def misses_within(events: np.ndarray, pid: int, begin_ns: int, end_ns: int) -> int:
    """Number of misses of a process in a time."""
    data = np.ascontiguousarray(events)
    return int(load_library().count_misses(data.ctypes.data, data.nbytes, pid, begin_ns, end_ns))


class Controller:
    """When `--min-tps` switches which level."""

    def __init__(self, min_tps: float):
        self._lib = load_library()
        self._at = self._lib.new_controller(min_tps)
        self._names: dict[str, bytes] = {}  # the controller keeps pointers to names

    @property
    def hold_ns(self) -> int:
        """How long decode must be good before a level comes back."""
        return int(self._lib.hold_of(self._at))

    def observe(self, durations_ns: Iterable[int]) -> None:
        """Add decode steps in order."""
        for duration in durations_ns:
            self._lib.observe_duration(self._at, duration)

    def tps(self) -> float:
        """Tokens per second; 0 if there are too few."""
        return float(self._lib.speed(self._at))

    def decide(self, now_ns: int, on: dict[str, float]) -> Change | None:
        """The change to make now, if any."""
        rows = [LevelCost(self._names.setdefault(name, name.encode()), ns) for name, ns in on.items()]
        change = CChange()
        if not self._lib.decide(self._at, now_ns, (LevelCost * len(rows))(*rows), len(rows), byref(change)):
            return None
        return Change(change.ts_ns, change.level.decode(), change.on, change.tps, change.why.decode())


class Explanation:
    """Whether slow steps are explained by context and missed experts."""

    def __init__(self, min_tps: float):
        self._lib = load_library()
        self._at = self._lib.new_explanation(min_tps)

    def observe(self, steps: Iterable[tuple[int, int, float]], good: bool) -> None:
        """Add steps as (context, experts missed, seconds)."""
        for context, missed, seconds in steps:
            self._lib.observe_step(self._at, context, missed, seconds, good)

    def holds(self) -> bool:
        """Whether a typical step would be fast enough now."""
        return bool(self._lib.explains_speed(self._at))

    def to_json(self) -> dict[str, Any]:
        """The learnt costs and their errors."""
        names = ("seconds", "seconds_per_1000_tokens", "seconds_per_miss")
        learnt = {name: self._lib.coefficient_of(self._at, term) for term, name in enumerate(names)}
        error = self._lib.error_of(self._at)
        return {"coefficients": learnt, "error": {name: getattr(error, name) for name, _ in LatencyError._fields_}}


class Budget:
    """How long `--max-overhead` has levels on and off."""

    def __init__(self, allowed: float, besides: float = 0.0):
        self.allowed, self.besides, self._lib = allowed, besides, load_library()
        self._at = self._lib.new_budget(allowed, besides)

    def observe(self, on: bool, durations_ns: list[int]) -> None:
        """Add decode steps within the current window."""
        self._lib.observe_all(self._at, False, on, (c_double * len(durations_ns))(*durations_ns), len(durations_ns))

    def observe_change(self, durations_ns: list[int]) -> None:
        """Add decode steps that began while levels were switched."""
        self._lib.observe_all(self._at, True, True, (c_double * len(durations_ns))(*durations_ns), len(durations_ns))

    def is_over(self, on: bool, since_ns: int, now_ns: int) -> bool:
        """Whether the current window has lasted long enough."""
        return bool(self._lib.is_window_over(self._at, on, since_ns, now_ns))

    def slowdown(self) -> float | None:
        """Relative increase of the time per step while the levels are on."""
        value = c_double()
        return value.value if self._lib.slowdown_while_on(self._at, byref(value)) else None

    def lost(self) -> float | None:
        """The share by which decode has recently been slower."""
        value = c_double()
        return value.value if self._lib.lost_share(self._at, byref(value)) else None

    @property
    def windows(self) -> list[Window]:
        """The latest windows."""
        count = c_int()
        rows = self._lib.windows_of(self._at, byref(count))
        return [Window(row.on, row.step_ns) for row in rows[: count.value]]
