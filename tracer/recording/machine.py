"""Description of this machine, for the manifest."""

import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

from tracer.recording import heat


@cache
def describe() -> dict[str, Any]:
    """Architecture, kernel, operating system, CPU model, CPUs, frequency governors ("" if there is none) and memory."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Hardware", "Model"):
            model = value.strip()
            break
    return {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "os": release.get("PRETTY_NAME", platform.system()),
        "cpu_model": model,
        "cpus": os.cpu_count() or 0,
        "governor": heat.governors(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def clocks() -> dict[str, int]:
    """A reading of the three clocks that traces use, nanoseconds."""
    return {
        "monotonic_ns": time.monotonic_ns(),
        "boottime_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "realtime_ns": time.time_ns(),
    }
