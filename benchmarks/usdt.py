"""What the runtime's probes cost when nobody traces: ns per call from Python, beside an empty function and a bare loop.

python -m benchmarks.usdt
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from runtime.telemetry import _probes  # type: ignore[attr-defined]

CALLS, REPEATS = 200_000, 9
EXPERTS, WEIGHTS = np.zeros(16, np.uint16), np.zeros(16, np.float32)
SOURCES = np.zeros(4, np.uint64).tobytes()
CASES: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "empty function": (lambda *a: None, (1, 2, 3, 4)),
    "token__begin": (_probes.token__begin, (1, 2, 1, 40)),
    "op__begin": (_probes.op__begin, (1, 2, 1, 7, SOURCES)),
    "graph": (_probes.graph, (max, 1, 2, 1, 2, 3, 4, 1, 8 << 32)),
    "expert__begin": (_probes.expert__begin, (1, 2, 3, 1, 1, 8)),
    "route": (_probes.route, (1, 8, 2, EXPERTS, WEIGHTS)),
    "load__end": (_probes.load__end, (1, 2, 3, 4)),
}


def per_call(function: Callable[..., object], arguments: tuple[object, ...]) -> float:
    began = time.perf_counter_ns()
    for _ in range(CALLS):
        function(*arguments)
    return (time.perf_counter_ns() - began) / CALLS


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for name, case in CASES.items():
            times[name].append(per_call(*case))
    for name, values in times.items():
        print(f"{name:16} {statistics.median(values):6.0f} ns  ({min(values):.0f} .. {max(values):.0f})")


if __name__ == "__main__":
    main()
