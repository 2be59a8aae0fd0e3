"""Evicts and reloads experts' context binaries, counts remaining resources, and runs two experts at once."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from runtime.backends.htp import HtpBackend

WARM = 20
DIMS = {"T": 1}


def memory_in_use() -> int:
    """Proportional set size of this process in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


def resources_in_use() -> dict[str, int]:
    gc.collect()
    return {"pss": memory_in_use(), "threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}


def run_cycles(backend: HtpBackend, names: list[str], cycles: int) -> list[dict[str, int]]:
    """Load, run and drop an expert `cycles` times; returns the resources in use when warm, halfway and at the end."""
    row = {"rows": np.ones((1, backend.package.family.hidden), np.float32)}
    stood = []
    for i in range(WARM + cycles):
        session = backend.session(names[i % len(names)], DIMS)
        session.run(None, row)
        del session
        if i + 1 in (WARM, WARM + cycles // 2, WARM + cycles):
            stood.append(resources_in_use())
    return stood


def from_two_threads(backend: HtpBackend, names: list[str], runs: int) -> bool:
    """Whether two concurrent experts return the same results as each alone."""
    random = np.random.default_rng(0)
    row = {"rows": random.standard_normal((1, backend.package.family.hidden)).astype(np.float32)}
    sessions = [backend.session(name, DIMS) for name in names[:2]]
    alone = [session.run(None, row)[0] for session in sessions]
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda session: [session.run(None, row)[0] for _ in range(runs)], sessions)
        return all(np.array_equal(out, expected) for outs, expected in zip(both, alone, strict=True) for out in outs)
