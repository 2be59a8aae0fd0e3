"""The runtime's USDT probes: functions of the C extension `_probes`, or functions that do nothing if it is not built.

The numbers below and in `runtime.cache_rules.forms` are the values of the probes' arguments; bpf/records.h and tracer/engines
use the same names.
"""

import sys
from collections.abc import Callable
from enum import IntEnum
from struct import pack
from time import monotonic_ns
from typing import Any


class Kind(IntEnum):
    """Numbers of operators and kinds of graphs."""

    EMBED = 0
    ATTENTION = 1
    ROUTER = 2
    DISPATCH = 3
    EXPERT = 4
    COMBINE = 5
    HEAD = 6
    SAMPLE = 7
    MLP = 8
    NORM = 9


class Phase(IntEnum):
    """The phase of a forward step."""

    PREFILL = 1
    DECODE = 2


def _no_probe(*arguments: Any) -> None:
    """Replaces a probe if the extension is not built."""


def _run_graph(run: Callable[[Any, Any], Any], first: Any, second: Any, *probe_arguments: int) -> tuple[Any, int]:
    """Replaces `graph`; returns (result of run, ns that it took)."""
    began = monotonic_ns()
    result = run(first, second)
    return result, monotonic_ns() - began


try:
    from runtime.telemetry import _probes  # type: ignore[attr-defined]
except ImportError:
    _probes = None

built = _probes is not None
_warned = False


def warn_if_missing() -> None:
    """Warn once, on standard error, that the probes are not built."""
    global _warned
    if not built and not _warned:
        print("moescope: runtime/telemetry/_probes.so is not built (run `make`): no USDT probes in this process", file=sys.stderr)
    _warned = True


native: Any = _probes
"""The extension; None if it is not built."""


def native_or(name: str, instead: Any) -> Any:
    """The extension's object with this name, or `instead` if it is not built."""
    return getattr(_probes, name) if built else instead


token_begin = native_or("token__begin", _no_probe)
token_end = native_or("token__end", _no_probe)
op_begin = native_or("op__begin", _no_probe)
op_end = native_or("op__end", _no_probe)
graph = native_or("graph", _run_graph)
expert_begin = native_or("expert__begin", _no_probe)
expert_end = native_or("expert__end", _no_probe)
route = native_or("route", _no_probe)
load_begin = native_or("load__begin", _no_probe)
load_end = native_or("load__end", _no_probe)
evict = native_or("evict", _no_probe)
guard_mapped_files = native_or("guard_mapped_files", _no_probe)
"""For programs, not for libraries: once called, an unreadable mapped file ends the process with one line and code 2."""


def result_id(kind: int, layer: int = -1, expert: int = -1) -> int:
    """Identity of an operator's result, the same in every step."""
    return 1 << 48 | kind << 32 | (layer + 1) << 16 | (expert + 1)


def weight_id(kind: int, layer: int = -1, expert: int = -1) -> int:
    """Identity of an operator's weights."""
    return 2 << 48 | kind << 32 | (layer + 1) << 16 | (expert + 1)


def pack_sources(*ids: int) -> bytes:
    """Tensor identities in the format that op_begin expects."""
    return pack(f"={len(ids)}Q", *ids)
