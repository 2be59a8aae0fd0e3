"""Description of this machine, for benchmarks and the machine's ceilings."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any


@cache
def describe_machine() -> dict[str, Any]:
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
        "governor": cpu_governors(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def cpu_governors() -> str:
    """The CPUs' frequency governors, separated by commas; "" if there is none."""
    found = {path.read_text().strip() for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")}
    return ",".join(sorted(found))
