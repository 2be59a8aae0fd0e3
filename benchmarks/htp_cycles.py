"""Evicts and reloads context binaries, and looks for what is left: python -m benchmarks.htp_cycles PACKAGE [--rounds 1000].

Each cycle drops one expert's session on the HTP (its emulator on x86-64) and loads another from its context binary. Afterwards
memory, threads and open files must stand where they stood once the process was warm; then two experts run from two threads
at once and must give what they give alone.
"""

import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.lib.report import Report, arguments
from benchmarks.lib.spread import single
from runtime.backends.cpu import return_freed_memory
from runtime.backends.htp import EMULATED, HtpBackend
from runtime.package.layout import Package, expert_name

WARM = 20
DIMS = {"T": 1}
UNITS = {"pss": ("MiB", 1 << 20), "threads": ("count", 1), "files": ("count", 1)}


def pss() -> int:
    """Proportional set size of this process in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


def standing() -> dict[str, int]:
    gc.collect()
    return {"pss": pss(), "threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}


def cycle(backend: HtpBackend, names: list[str], cycles: int) -> list[dict[str, int]]:
    """Load, run and drop an expert `cycles` times; what stood when warm, halfway and at the end."""
    row = {"rows": np.ones((1, backend.package.family.hidden), np.float32)}
    stood = []
    for i in range(WARM + cycles):
        session = backend.session(names[i % len(names)], DIMS)
        session.run(None, row)
        del session
        if i + 1 in (WARM, WARM + cycles // 2, WARM + cycles):
            stood.append(standing())
    return stood


def from_two_threads(backend: HtpBackend, names: list[str], runs: int) -> bool:
    """Do two experts that run at the same time give what each gives alone?"""
    random = np.random.default_rng(0)
    row = {"rows": random.standard_normal((1, backend.package.family.hidden)).astype(np.float32)}
    sessions = [backend.session(name, DIMS) for name in names[:2]]
    alone = [session.run(None, row)[0] for session in sessions]
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda session: [session.run(None, row)[0] for _ in range(runs)], sessions)
        return all(np.array_equal(out, expected) for outs, expected in zip(both, alone, strict=True) for out in outs)


def main() -> int:
    parser = arguments(__doc__, rounds=1000, help_rounds="evictions and reloads")
    parser.add_argument("package", type=Path)
    args = parser.parse_args()
    return_freed_memory()
    package, report = Package(args.package), Report("htp_cycles", args)
    backend = HtpBackend(package, (1,))
    labels = ("emulator",) if EMULATED else ()
    names = [expert_name(0, expert) for expert in range(min(4, package.family.experts))]
    warm, half, end = cycle(backend, names, args.rounds)
    for when, standing_then in (("warm", warm), ("halfway", half), ("at the end", end)):
        for name, (unit, scale) in UNITS.items():
            report.add(f"{name}, {when}", unit, single(standing_then[name] / scale), labels=labels)
    same = from_two_threads(backend, names, 50)
    report.note(f"two experts from two threads: {'the same results as alone' if same else 'DIFFERENT results'}")
    report.finish()
    leaked = end["pss"] - half["pss"] > 4 << 20 or end["threads"] > warm["threads"] or end["files"] > warm["files"]
    return 1 if leaked or not same else 0


if __name__ == "__main__":
    sys.exit(main())
