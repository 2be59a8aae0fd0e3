"""Evicts and reloads context binaries, and looks for what is left: htp_cycles.py PACKAGE [--cycles 1000].

Each cycle drops one expert's session on the HTP (its emulator on x86-64) and loads another from its context binary. Afterwards
memory, threads and open files must stand where they stood once the process was warm; then two experts run from two threads
at once and must give what they give alone.
"""

import argparse
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from runtime.backends.cpu import return_freed_memory
from runtime.backends.htp import LABEL, HtpBackend
from runtime.package.layout import Package, expert_name

WARM = 20
DIMS = {"T": 1}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--cycles", type=int, default=1000)
    args = parser.parse_args()
    return_freed_memory()
    package = Package(args.package)
    backend = HtpBackend(package, (1,))
    names = [expert_name(0, expert) for expert in range(min(4, package.family.experts))]
    warm, half, end = cycle(backend, names, args.cycles)
    print(f"{LABEL}: {args.cycles} evictions and reloads of {len(names)} experts' context binaries")
    for name, unit in (("pss", 1 << 20), ("threads", 1), ("files", 1)):
        print(f"{name:<8} warm {warm[name] / unit:.1f}  halfway {half[name] / unit:.1f}  end {end[name] / unit:.1f}")
    same = from_two_threads(backend, names, 50)
    print(f"two experts from two threads: {'the same results as alone' if same else 'DIFFERENT results'}")
    leaked = end["pss"] - half["pss"] > 4 << 20 or end["threads"] > warm["threads"] or end["files"] > warm["files"]
    sys.exit(1 if leaked or not same else 0)


if __name__ == "__main__":
    main()
