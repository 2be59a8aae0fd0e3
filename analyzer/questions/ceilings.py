"""Upper limits of this machine: memory bandwidth and floating-point speed, measured once and cached.

Measured with NumPy, which releases the interpreter lock: `bandwidth` is that of dot products of vectors far larger than any
cache (reading only, as weights are read), `flops` that of fp32 matrix products of 512 x 512, `launch_ns` that of a product of
8 x 8, the minimum cost of a call. Each is the best of several short runs, for one thread and for all CPUs.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.errors import AnalysisError
from analyzer.records.manifest import section
from moescope.scratch import replaced_file
from tracer.recording.machine import describe_machine

VECTOR_BYTES = 64 << 20
SIDE = 512
SECONDS, REPEATS = 0.06, 3
"""Duration of a run and runs of each of the five measurements: a second in all."""
VERSION = 1


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second and fp32 operations per second, by number of threads ("1" and all CPUs); ns of the smallest call."""

    cpu_model: str
    cpus: int
    bandwidth: dict[str, float]
    flops: dict[str, float]
    launch_ns: float

    def of(self, threads: int) -> tuple[float, float]:
        """(bytes/s, flops/s) for `threads` threads: proportional to one thread's figures, limited to those of all CPUs."""
        share = min(max(threads, 1), self.cpus)
        bandwidth, flops = (
            min(max(share * table["1"], table["1"]), max(table["1"], table[str(self.cpus)]))
            for table in (self.bandwidth, self.flops)
        )
        return bandwidth, flops

    def fits(self, machine: dict[str, Any]) -> bool:
        """Whether they were measured on a machine like the one that a manifest describes."""
        return (machine.get("cpu_model"), machine.get("cpus")) == (self.cpu_model, self.cpus)


def cache_file() -> Path:
    """The file with the cached ceilings of this machine."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moescope"
    model = describe_machine()["cpu_model"]
    name = hashlib.sha256(f"{VERSION} {os.uname().machine} {model} {os.cpu_count()}".encode()).hexdigest()[:16]
    return folder / f"ceilings-{name}.json"


def read_ceilings(path: Path) -> Ceilings:
    """Ceilings from a file, possibly of another machine."""
    try:
        return Ceilings(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise AnalysisError(
            f"{path} holds no ceilings ({error}); measure them with: moescope predict ceilings --out FILE"
        ) from None


def write_ceilings(ceilings: Ceilings, path: Path) -> None:
    """Write ceilings to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as temporary:
        temporary.write_text(json.dumps(asdict(ceilings), indent=1))


def measure_separately() -> Ceilings:
    """Measure now, in a separate process, since BLAS libraries read their number of threads at import."""
    single = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", "analyzer.questions.ceilings"]
    done = subprocess.run(command, env={**os.environ, **single, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise AnalysisError(f"the ceilings cannot be measured here: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return Ceilings(**json.loads(done.stdout))


def stored_or_measured(fresh: bool = False) -> Ceilings:
    """This machine's ceilings, measured if there are none yet or if `fresh`."""
    if fresh or not cache_file().exists():
        write_ceilings(measure_separately(), cache_file())
    return read_ceilings(cache_file())


def ceilings_for(manifest: dict[str, Any], path: Path | None = None) -> Ceilings | None:
    """The ceilings for a recording's machine: from `path`, else this machine's cached ones if it is of that kind, else None."""
    if path is not None:
        return read_ceilings(path)
    ceilings = read_ceilings(cache_file()) if cache_file().exists() else None
    return ceilings if ceilings is not None and ceilings.fits(section(manifest, "machine")) else None


def calls_per_s(once: Callable[[], object], threads: int) -> float:
    """Total calls per second of all threads, the best of several runs."""

    def loop(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            once()
            count += 1
        return count

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            began = time.perf_counter()
            calls = sum(pool.map(loop, [began + SECONDS] * threads))
            best = max(best, calls / (time.perf_counter() - began))
    return best


def measure_here() -> Ceilings:
    """Measure in this process; its BLAS must be limited to one thread."""
    cpus = os.cpu_count() or 1
    vector = np.ones(VECTOR_BYTES // 4, np.float32)
    matrix, small = np.ones((SIDE, SIDE), np.float32), np.ones((8, 8), np.float32)
    counts = sorted({1, cpus})
    bandwidth = {str(n): VECTOR_BYTES * calls_per_s(lambda: vector.dot(vector), n) for n in counts}
    flops = {str(n): 2.0 * SIDE**3 * calls_per_s(lambda: matrix @ matrix, n) for n in counts}
    return Ceilings(describe_machine()["cpu_model"], cpus, bandwidth, flops, 1e9 / calls_per_s(lambda: small @ small, 1))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here())))
