"""Measures this machine as a device profile: matrix products, memory and storage, each the best of several tries."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

SIDE = 768
STREAM_BYTES = 128 << 20
FILE_BYTES = 96 << 20
TRIES = 5


def measure_machine(folder: Path | None = None) -> dict[str, float]:
    """fp32 operations per second, memory and storage bytes per second, memory bytes. `folder`: on the storage to measure."""
    return {
        "fp32_per_s": 2 * SIDE**3 / _fastest_seconds(_flops_per_s()),
        "memory_bytes_per_s": 2 * STREAM_BYTES / _fastest_seconds(_memory_bandwidth()),
        "storage_bytes_per_s": _storage_bandwidth(folder),
        "memory_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def to_toml(measured: dict[str, float], name: str) -> str:
    """A device profile in the format of analyzer/predict/devices."""
    return f'''name = "{name}"

[units.cpu]
tera_per_s = {{ fp32 = {measured["fp32_per_s"] / 1e12:.4g} }}
mfu = 1.0

[memory]
gigabytes = {measured["memory_bytes"] / 1e9:.4g}
gigabytes_per_s = {measured["memory_bytes_per_s"] / 1e9:.4g}
efficiency = 1.0

[storage]
gigabytes_per_s = {measured["storage_bytes_per_s"] / 1e9:.4g}

[sources]
cpu = "measured: fp32 product of {SIDE} x {SIDE} matrices in NumPy, best of {TRIES}; hence an MFU of 1"
memory = "measured: copy of {STREAM_BYTES >> 20} MiB, read and written bytes, best of {TRIES}"
storage = "measured: sequential read of {FILE_BYTES >> 20} MiB in 4 MiB pieces, past the page cache where it can be dropped"
'''


def _fastest_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several tries, after a warm-up."""
    work()
    times = []
    for _ in range(TRIES):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return min(times)


def _flops_per_s() -> Callable[[], object]:
    a = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, a, out=out)


def _memory_bandwidth() -> Callable[[], object]:
    source = np.ones(STREAM_BYTES // 8)
    target = np.ones_like(source)
    return lambda: np.copyto(target, source)


def _storage_bandwidth(folder: Path | None) -> float:
    """Bytes per second of a file's first read after its pages were dropped from the page cache."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        begin = perf_counter()
        while os.read(file.fileno(), 4 << 20):
            pass
        return FILE_BYTES / (perf_counter() - begin)
