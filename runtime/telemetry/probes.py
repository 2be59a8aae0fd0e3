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


def _nothing(*arguments: Any) -> None:
    """Replaces a probe if the extension is not built."""


def _graph(run: Callable[[Any, Any], Any], first: Any, second: Any, *probe_arguments: int) -> tuple[Any, int]:
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


def native(name: str, instead: Any) -> Any:
    """The extension's object with this name, or `instead` if it is not built."""
    return getattr(_probes, name) if built else instead


token_begin = native("token__begin", _nothing)
token_end = native("token__end", _nothing)
op_begin = native("op__begin", _nothing)
op_end = native("op__end", _nothing)
graph = native("graph", _graph)
expert_begin = native("expert__begin", _nothing)
expert_end = native("expert__end", _nothing)
route = native("route", _nothing)
load_begin = native("load__begin", _nothing)
load_end = native("load__end", _nothing)
evict = native("evict", _nothing)
guard_mapped_files = native("guard_mapped_files", _nothing)
"""For programs, not for libraries: once called, an unreadable mapped file ends the process with one line and code 2."""


def result_id(kind: int, layer: int = -1, expert: int = -1) -> int:
    """Identity of an operator's result, the same in every step."""
    return 1 << 48 | kind << 32 | (layer + 1) << 16 | (expert + 1)


def weight_id(kind: int, layer: int = -1, expert: int = -1) -> int:
    """Identity of an operator's weights."""
    return 2 << 48 | kind << 32 | (layer + 1) << 16 | (expert + 1)


def sources(*ids: int) -> bytes:
    """Tensor identities in the format that op_begin expects."""
    return pack(f"={len(ids)}Q", *ids)
