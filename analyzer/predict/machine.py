"""Measures this machine as a device profile: matrix products, memory and storage, each the best of several tries."""

import json
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
        "fp32_per_s": 2 * SIDE**3 / _fastest_seconds(flops_work()),
        "memory_bytes_per_s": 2 * STREAM_BYTES / _fastest_seconds(memory_work()),
        "storage_bytes_per_s": _storage_bandwidth(folder),
        "memory_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def to_toml(measured: dict[str, float], name: str, watts: dict[str, float | str] | None = None) -> str:
    """A device profile in the format of analyzer/predict/devices; `watts`: of machine_power.measure_watts."""
    profile = f'''name = "{name}"

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
    return profile + power_toml(watts) if watts else profile


def power_toml(watts: dict[str, float | str]) -> str:
    """The watts of a profile; the last table of `to_toml` is that of sources."""
    figures = {name: f"{value:.4g}" for name, value in watts.items() if not isinstance(value, str)}
    source = json.dumps(
        f"measured by {watts['rail']}: matrix products on all cores, a copy of memory, reads past the page cache, idle"
    )
    return f"""power = {source}

[units.cpu.watts]
compute = {figures["compute"]}
memory = {figures["memory"]}

[power]
idle_watts = {figures["idle"]}
storage_watts = {figures["storage"]}
"""


def _fastest_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several tries, after a warm-up."""
    work()
    times = []
    for _ in range(TRIES):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return min(times)


def flops_work() -> Callable[[], object]:
    """One product of matrices, on all cores."""
    a = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, a, out=out)


def memory_work() -> Callable[[], object]:
    """One copy of memory."""
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
