"""Features that this kernel offers to BPF programs, each detected by trying it, and its build options."""

import ctypes
import gzip
import os
import platform
from dataclasses import dataclass
from functools import cache

from tracer.kernel.btf import VMLINUX

KPROBE_TYPE = 2
RINGBUF_MAP = 27
CURRENT_TASK_BTF, ATTACH_COOKIE = 158, 174  # numbers of helpers
CONFIGS = ("/proc/config.gz", "/boot/config-{0}", "/lib/modules/{0}/config", "/lib/modules/{0}/build/.config")


@dataclass(frozen=True)
class Offered:
    """Kernel features written into the BPF programs before loading: `has_<field>` of bpf/compat.h."""

    task_btf: bool
    cookies: bool


def offered(lib: ctypes.CDLL) -> Offered:
    """Detect this kernel's features."""
    return Offered(
        # Linux 5.11: 3ca1032ab7ab "bpf: Implement get_current_task_btf and RET_PTR_TO_BTF_ID"; typed by the kernel's BTF
        task_btf=VMLINUX.exists() and lib.libbpf_probe_bpf_helper(KPROBE_TYPE, CURRENT_TASK_BTF, None) == 1,
        # Linux 5.15: 7adfc6c9b315 "bpf: Add bpf_get_attach_cookie() BPF helper to access bpf_cookie value"
        cookies=lib.libbpf_probe_bpf_helper(KPROBE_TYPE, ATTACH_COOKIE, None) == 1,
    )


def has_ring_buffers(lib: ctypes.CDLL) -> bool:
    """Linux 5.8: 457f44363a88 "bpf: Implement BPF ring buffer and verifier support for it"."""
    return int(lib.libbpf_probe_bpf_map_type(RINGBUF_MAP, None)) == 1


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
