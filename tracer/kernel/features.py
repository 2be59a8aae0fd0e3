"""Machines that can be recorded, and this kernel's build options."""

import gzip
import os
import platform
from functools import cache
from pathlib import Path

ARCHITECTURES = {"x86_64": "x64", "aarch64": "AArch64"}
"""As uname and as ELF files name them."""
VMLINUX = Path("/sys/kernel/btf/vmlinux")
"""The running kernel's types."""
CONFIGS = ("/proc/config.gz", "/boot/config-{0}", "/lib/modules/{0}/config", "/lib/modules/{0}/build/.config")


@cache
def kernel_config() -> dict[str, str] | None:
    """The running kernel's build options; None if this machine does not expose them."""
    for place in CONFIGS:
        path = place.format(platform.release())
        if not os.path.exists(path):
            continue
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            pairs = (line.rstrip("\n").partition("=") for line in file if line.startswith("CONFIG_"))
            return {name: value for name, _, value in pairs}
    return None


def option_state(name: str) -> str:
    """`CONFIG_X=y`, `CONFIG_X is not set`, or the bare name if the kernel's configuration is unknown."""
    config = kernel_config()
    if config is None:
        return name
    return f"{name}={config[name]}" if name in config else f"{name} is not set"
