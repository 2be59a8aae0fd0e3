"""Cost of the runtime's probes while untraced: ns per call from Python, with an empty function and a bare loop.

python -m benchmarks.usdt [--rounds 9]
"""

import time
from collections.abc import Callable

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from benchmarks.lib.turns import by_turns
from runtime.telemetry import _probes  # type: ignore[attr-defined]

CALLS = 200_000
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
    args = make_parser(__doc__, rounds=9).parse_args()
    report, times = Report("usdt", args), {name: list[float]() for name in CASES}
    for _, name in by_turns(list(CASES), args.rounds):
        times[name].append(per_call(*CASES[name]))
    for name, values in times.items():
        report.add(name, "ns per call", extremes(values))
    report.finish()


if __name__ == "__main__":
    main()
